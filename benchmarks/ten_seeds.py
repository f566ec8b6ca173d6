"""Runs the demo, `autowzry_train` without other options than the seed, for ten seeds, and writes down how each ended.

    python benchmarks/ten_seeds.py [SEEDS]

Takes about twenty minutes on two CPU cores. The results go to benchmarks/results/ten_seeds.json and, as a table, to the screen.
Win rates are over 200 battles that were not used for choosing the best model. Seconds and memory are of the whole command.
"""
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import torch

RESULTS = Path(__file__).parent / "results" / "ten_seeds.json"
PLAYERS = {"random": "Random policy", "recorded": "Recorded player", "trained": "Trained policy"}
LIMITS = {"random": (0, 5), "recorded": (0, 50), "trained": (85, 100)}


def peak_memory(process):
    "Watch a process until it ends and return the most memory that it held, in MiB."
    peak, watched = 0, psutil.Process(process.pid)
    while process.poll() is None:
        try: peak = max(peak, watched.memory_info().rss)
        except psutil.NoSuchProcess: break
        time.sleep(0.1)
    return peak / 2**20


def run(seed, folder):
    "The demo with one seed."
    command = [shutil.which("autowzry_train", path=sysconfig.get_path("scripts")), "--seed", str(seed), "--out", str(folder / str(seed))]
    with open(folder / f"{seed}.log", "w", encoding="utf-8") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
        memory = peak_memory(process)
        process.wait()
    told = (folder / f"{seed}.log").read_text(encoding="utf-8")
    if process.returncode: sys.exit(f"seed {seed} failed:\n{told}")
    wins = {name: float(re.search(rf"^{said}: (\d+\.\d)% wins$", told, flags=re.M)[1]) for name, said in PLAYERS.items()}
    reached = all(low <= wins[name] <= high for name, (low, high) in LIMITS.items())
    return {"seed": seed, **wins, "reached": reached, "seconds": round(time.perf_counter() - started, 1), "peak_mib": round(memory)}


def main():
    rows = []
    print("| seed | random % | recorded % | trained % | seconds | peak MiB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
            rows.append(row := run(seed, Path(folder)))
            print(f"| {row['seed']} | {row['random']} | {row['recorded']} | {row['trained']} | {row['seconds']} | {row['peak_mib']} |", flush=True)
    reached = sum(row["reached"] for row in rows)
    print(f"\n{reached} of {len(rows)} seeds: random at most 5%, recorded at most 50%, trained at least 85%")
    machine = {"cpu_cores": psutil.cpu_count(), "processor": platform.machine(), "system": platform.system(), "python": platform.python_version(), "torch": torch.__version__}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "reached": reached, "of": len(rows), "runs": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__": main()

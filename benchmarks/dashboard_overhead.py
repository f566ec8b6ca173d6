"""What training through the dashboard costs over `Trainer.train`, on the same work, side by side.

    python benchmarks/dashboard_overhead.py [PAIRS]

Takes about five minutes on two CPU cores. A pair is one training with each, in turns, the order changing from pair to pair; the ratio of
their seconds is taken pair by pair. The dashboard draws its figures and updates its widgets as in a notebook, without a page to send them to;
it is timed from the press of Train to the end, with the panel there before.
The results go to benchmarks/results/dashboard_overhead.json and to the screen.
"""
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from autowzry_agent.config import Config
from autowzry_agent.dashboard import Dashboard
from autowzry_agent.environment import LANE_ID, make_env, record, scripted_policy
from autowzry_agent.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "dashboard_overhead.json"


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    buffer = record(make_env(LANE_ID), scripted_policy(), steps=2000, frame_shape=(3, 44, 44))
    config = Config(model_mode="mini", input_shape=buffer.frame_shape, batch_size=32, use_amp=False, device="cpu", num_epochs=8, steps_per_epoch=100, target_update_epochs=2)
    dataset = Trainer(config, verbose=False).dataset(buffer)

    def plain():
        started = time.perf_counter()
        Trainer(config, verbose=False).train(dataset)
        return time.perf_counter() - started

    def through_the_dashboard():
        dashboard = Dashboard(config, buffer)
        dashboard._dataset = dataset
        started = time.perf_counter()
        dashboard.start()
        assert dashboard.wait().state == "finished"
        took = time.perf_counter() - started
        dashboard.close()
        return took

    plain(), through_the_dashboard()
    measured = []
    for pair in range(pairs):
        order = [plain, through_the_dashboard][::1 if pair % 2 else -1]
        took = {train.__name__: train() for train in order}
        measured.append(took)
        print(f"pair {pair + 1}: {took['plain']:.2f} s plain, {took['through_the_dashboard']:.2f} s through the dashboard", flush=True)
    ratios = [took["through_the_dashboard"] / took["plain"] for took in measured]
    found = {"median_ratio": statistics.median(ratios), "ratios": ratios, "pairs": measured, "steps": config.num_epochs * config.steps_per_epoch, "batch_size": config.batch_size,
        "machine": {"torch": torch.__version__, "python": platform.python_version(), "system": platform.system(), "processor": platform.machine(), "cpu_cores": os.cpu_count(), "threads": torch.get_num_threads()}}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"median of {pairs} ratios: {found['median_ratio']:.3f} (lowest {min(ratios):.3f}, highest {max(ratios):.3f})")


if __name__ == "__main__": main()

"""Trains the built-in battle to a winning policy in FP32 and in float16 on a CPU, with five seeds, and writes down how the policies play.

    python benchmarks/precision_study.py [SEEDS]

Takes about twenty minutes on one CPU core. The results go to benchmarks/results/precision_study/ after each seed: all numbers, a report and
a figure. Started again, it goes on with the seeds that are missing; delete the folder to begin anew.
The settings are the demo's but for half its batch, since float16 is slow on a CPU. The battles that judge were not used for choosing the best
model, and all policies play the same ones.
"""
import dataclasses
import sys
from pathlib import Path

from autowzry_agent.compare import Comparison, compare_precision
from autowzry_agent.config import Config, default_config_path
from autowzry_agent.environment import LANE_ID, evaluate, make_env, record, scripted_policy

RESULTS = Path(__file__).parent / "results" / "precision_study"
RECORDED_STEPS = 20_000
JUDGING, CHOOSING = 200, 50  # battles


def main():
    config = Config.from_yaml(default_config_path("lane")).replace(batch_size=16, device="cpu")
    lane = make_env(LANE_ID)
    buffer = record(lane, scripted_policy(), steps=RECORDED_STEPS, frame_shape=config.input_shape)
    judge = lambda model: evaluate(model, lane, JUDGING, seed=1).win_rate
    choose = lambda model: evaluate(model, lane, CHOOSING, seed=0).win_rate
    done = Comparison.load(RESULTS) if (RESULTS / "comparison.json").exists() else None
    if done and done.config != config.as_dict(): sys.exit(f"{RESULTS} holds a study with other settings; delete it to begin anew")
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        if done and seed in {run.seed for run in done.runs}: continue
        found = compare_precision(config, buffer, [seed], ["fp32", "float16"], judge, choose, f"win rate over {JUDGING} battles")
        done = dataclasses.replace(found, runs=(done.runs if done else []) + found.runs)
        done.save(RESULTS)
    print(done)


if __name__ == "__main__": main()

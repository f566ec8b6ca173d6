"""FP32 against AMP: the same work for all, what is measured, what is said about it, and the command."""
import contextlib
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import weakref

import numpy as np
import pytest
import torch

from autowzry_agent import compare
from autowzry_agent.buffer import TrainingBuffer
from autowzry_agent.compare import Comparison, ComparisonFileError, Run, compare_precision, default_precisions, kept_for_backward, mean_interval, precision_config
from autowzry_agent.config import Config, ConfigError
from autowzry_agent.environment import LANE_ID, make_env, record, scripted_policy
from autowzry_agent.trainer import Trainer


@pytest.fixture(scope="module")
def buffer():
    "Three hundred transitions of the built-in battle."
    return record(make_env(LANE_ID), scripted_policy(), steps=300, frame_shape=(3, 32, 32), progress=False)


def small_config(**changes):
    "A run of seconds."
    return Config(**{**dict(model_mode="mini", input_shape=(3, 32, 32), batch_size=4, num_epochs=3, steps_per_epoch=4, target_update_epochs=2,
        device="cpu", learning_rate=5e-4, gamma=0.95), **changes})


@pytest.fixture(scope="module")
def comparison(buffer):
    "All three precisions, two seeds; the score is the mean of a model's weights, so that it tells models apart, and the first model is always chosen."
    calls = itertools.count()
    score = lambda model: float(torch.cat([weights.detach().flatten() for weights in model.parameters()]).double().mean())
    return compare_precision(small_config(), buffer, (3, 4), ("fp32", "float16", "bfloat16"), score, lambda model: -next(calls), verbose=False)


# The same work

def test_every_run_is_what_a_trainer_alone_would_have_made_of_it(buffer, comparison):
    for run in comparison.runs:
        alone = Trainer(precision_config(small_config(), run.precision, run.seed), verbose=False).train(buffer)
        np.testing.assert_array_equal(run.history.loss, alone.loss)
        np.testing.assert_array_equal(run.history.scale, alone.scale)
        assert run.epoch_loss == alone.epoch_loss and run.in_effect == alone.precision


def test_the_settings_of_the_work_stay_as_they_are(buffer):
    config = small_config(use_amp=True, amp_dtype="bfloat16", on_divergence="fp32", num_epochs=1)
    found = compare_precision(config, buffer, [0], verbose=False)
    assert found.config == config.as_dict() and [run.in_effect for run in found.runs] == ["False (use_amp is false)", "True (FP16 mixed precision)"]


def test_sixteen_bits_are_close_to_fp32_and_not_equal(comparison):
    for precision, near in (("float16", 2e-3), ("bfloat16", 2e-2)):
        for fp32, run in comparison.pairs(precision):
            assert run.seed == fp32.seed and run.history.loss[0] != fp32.history.loss[0]
            assert run.history.loss[0] == pytest.approx(fp32.history.loss[0], rel=near)
            assert 0 < run.distance[0] < run.distance[-1] < fp32.moved[-1] and len(run.distance) == 3


def test_all_runs_of_a_seed_see_the_same_batches(buffer, monkeypatch):
    seen, train_step = {}, Trainer.train_step
    def spied(self, batch):
        seen.setdefault((self.config.seed, self.config.use_amp and self.config.amp_dtype), []).append(batch)
        return train_step(self, batch)
    monkeypatch.setattr(Trainer, "train_step", spied)
    compare_precision(small_config(), buffer, (0, 1), ("float16", "bfloat16"), verbose=False)
    seen[0, False].pop(0)  # a step that warms up the device and belongs to no run
    assert len(seen) == 6 and all(len(batches) == 12 for batches in seen.values())
    for seed in (0, 1):
        for precision in ("float16", "bfloat16"):
            for mine, of_fp32 in zip(seen[seed, precision], seen[seed, False]): assert all(torch.equal(a, b) for a, b in zip(mine, of_fp32))
    assert not torch.equal(seen[0, False][0].states, seen[1, False][0].states)


def test_epochs_take_turns_and_each_round_begins_with_another(buffer, monkeypatch):
    order, train_epoch = [], Trainer._train_epoch
    def spied(self, *args):
        order.append((self.config.seed, self.epoch + 1, self.config.amp_dtype if self.config.use_amp else "fp32"))
        return train_epoch(self, *args)
    monkeypatch.setattr(Trainer, "_train_epoch", spied)
    compare_precision(small_config(steps_per_epoch=1), buffer, (0, 1), ("fp32", "float16", "bfloat16"), verbose=False)
    rounds = [["fp32", "float16", "bfloat16"], ["float16", "bfloat16", "fp32"], ["bfloat16", "fp32", "float16"]]
    assert order == [(seed, epoch, name) for seed in (0, 1) for epoch, names in enumerate(rounds, 1) for name in names]


def test_one_seed_at_a_time_and_one_copy_of_the_frames(buffer, monkeypatch):
    alive, most, datasets = [], [], []
    init, dataset = compare._Runner.__init__, Trainer.dataset
    def counted(self, *args):
        init(self, *args)
        alive.append(weakref.ref(self.trainer))
        most.append(sum(one() is not None for one in alive))
    monkeypatch.setattr(compare._Runner, "__init__", counted)
    monkeypatch.setattr(Trainer, "dataset", lambda self, buffer: datasets.append(1) or dataset(self, buffer))
    compare_precision(small_config(num_epochs=1, steps_per_epoch=1), buffer, (0, 1, 2), verbose=False)
    assert most == [1, 2] * 3 and len(datasets) == 1


# What is asked for

@pytest.mark.parametrize("changes, told", [
    ({"precisions": ["float16", "fp8"]}, "'fp8' is not known; allowed are fp32, float16 and bfloat16"),
    ({"precisions": "half"}, "'half' is not known"),
    ({"precisions": "fp32"}, "nothing to compare fp32 with"),
    ({"seeds": []}, "one or more numbers, all different"),
    ({"seeds": [1, 1]}, "all different"),
    ({"seeds": [-1]}, "seed is -1"),
])
def test_what_cannot_be_compared_is_refused_at_once(buffer, changes, told):
    with pytest.raises(ConfigError, match=re.escape(told)): compare_precision(small_config(), buffer, **changes)


def test_fp32_always_takes_part(buffer):
    found = compare_precision(small_config(num_epochs=1, steps_per_epoch=1), buffer, [0], "bfloat16", verbose=False)
    assert found.precisions == ["fp32", "bfloat16"]


def test_bfloat16_is_left_out_where_a_card_only_imitates_it(monkeypatch):
    "With stubs in the place of a card."
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    cuda = torch.device("cuda", 0)
    for native, expected in ((True, ("fp32", "float16", "bfloat16")), (False, ("fp32", "float16"))):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
        assert default_precisions(cuda) == expected
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # an older PyTorch
    assert "bfloat16" in default_precisions(cuda)


# What is measured

def test_kept_bytes_are_those_of_a_layer_one_can_count():
    "A linear layer without ReLU keeps its input for the weights' gradient, the loss keeps what it needs: counted by hand."
    class Toy:
        model = torch.nn.Linear(10, 1, bias=False)
        class precision:
            autocast = staticmethod(lambda: torch.autocast("cpu", enabled=False))
        td_target = staticmethod(lambda batch: None)
        loss = staticmethod(lambda batch, target: Toy.model(batch).sum())
    batch = torch.ones(6, 10)
    assert kept_for_backward(Toy, batch) == 6 * 10 * 4  # the input; the weights are the model's own


def test_kept_bytes_halve_with_the_batch_and_disturb_nothing(buffer):
    trainers = {name: Trainer(precision_config(small_config(), name, 0), verbose=False) for name in ("fp32", "float16", "bfloat16")}
    dataset = trainers["fp32"].dataset(buffer)
    small, large = (next(dataset.batches(size, 0, 1)) for size in (32, 96))
    grown = {name: kept_for_backward(trainer, large) - kept_for_backward(trainer, small) for name, trainer in trainers.items()}
    assert grown["float16"] == grown["bfloat16"] == pytest.approx(grown["fp32"] / 2, rel=0.01)
    fresh = Trainer(precision_config(small_config(), "float16", 0), verbose=False)
    for name, value in trainers["float16"].model.state_dict().items(): assert torch.equal(value, fresh.model.state_dict()[name])


def test_peak_memory_of_a_run_leaves_out_what_others_hold(monkeypatch):
    "The arithmetic, with a stub in the place of CUDA's counters."
    counters = {"now": 1000, "peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: counters["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counters["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counters.update(peak=counters["now"]))
    def use(most, left):
        counters.update(peak=max(counters["peak"], counters["now"] + most), now=counters["now"] + left)
        yield
    first, second = compare._Runner.__new__(compare._Runner), compare._Runner.__new__(compare._Runner)
    for runner in (first, second):
        runner.device, runner.held, runner.peak, runner.run = torch.device("cuda", 0), 0, 0, Run(0, "fp32")
        runner.first = torch.nn.Linear(1, 1)
        runner.trainer = type("", (), {"model": runner.first})
    first.epochs, second.epochs = use(50, 10), use(70, 30)
    first.turn(), second.turn()
    assert (first.held, first.peak, second.held, second.peak) == (10, 50, 30, 70)
    first.epochs = use(45, 0)
    first.turn()
    assert (first.held, first.peak) == (10, 55)


@pytest.mark.parametrize("values, expected", [
    ([1, 2, 3, 4, 5], (3, 1.03676, 4.96324)),  # 3 ± 2.776445 · 1.581139 / √5
    ([0, 1], (0.5, -5.85310, 6.85310)),  # 0.5 ± 12.706205 · 0.707107 / √2
    ([2, 2, 2], (2, 2, 2)),
    ([7], (7, -math.inf, math.inf)),
])
def test_the_interval_is_students(values, expected):
    assert mean_interval(values) == pytest.approx(expected, rel=1e-3)


def test_95_of_100_intervals_hold_the_mean():
    rng = np.random.default_rng(0)
    held = [low <= 1 <= high for _, low, high in (mean_interval(rng.normal(1, 2, 4)) for _ in range(4000))]
    assert 0.94 < np.mean(held) < 0.96


def test_scores_are_those_of_the_last_and_of_the_chosen_model(buffer, comparison):
    for run in comparison.runs: assert run.score == run.best_score != run.last_score
    without = compare_precision(small_config(num_epochs=1), buffer, [0], evaluate=lambda model: 1.0, verbose=False)
    assert [(run.last_score, run.best_score, run.score) for run in without.runs] == [(1.0, None, 1.0)] * 2


def test_a_score_that_is_no_number_counts_as_none(buffer):
    found = compare_precision(small_config(num_epochs=1, steps_per_epoch=1), buffer, [0], evaluate=lambda model: math.nan, verbose=False)
    assert [run.score for run in found.runs] == [None, None] and "policies were not judged" in found.verdict()


# Divergence and interruption

def test_a_precision_that_diverges_is_reported_and_the_others_go_on(buffer):
    "Rewards so large that their gradients overflow FP16 at any scale from 1 on, and are no trouble for FP32."
    config = small_config(init_scale=2.0**8, loss="mse", num_epochs=3, steps_per_epoch=12)
    poisoned = TrainingBuffer(None, (3, 32, 32), 9)
    poisoned.add_episode(np.random.default_rng(0).integers(0, 256, (41, 3, 32, 32), dtype=np.uint8), [0] * 40, [1e8] * 40, True)
    found = compare_precision(config, poisoned, (0, 1), evaluate=lambda model: 0.5, verbose=False)
    for fp32, amp in found.pairs("float16"):
        assert not fp32.diverged and len(fp32.epoch_loss) == 3 and fp32.score == 0.5
        assert "the scale fell below 1" in amp.diverged and amp.score is None and len(amp.epoch_loss) < 3
    assert "float16 diverged with 2 of 2 seeds (seed 0, 1)" in found.verdict()
    for run in found.runs: assert 0 <= run.skipped <= run.steps * len(run.epoch_loss)
    assert "float16, seed 1: Training diverged in epoch" in str(found) and re.search(r"runs diverged +\| 0 of 2 +\| 2 of 2 ", found.table())
    assert found.figure()._repr_png_()


def test_fp32_that_diverges_is_not_blamed_on_amp(buffer):
    found = compare_precision(small_config(learning_rate=1e20, num_epochs=2), buffer, [0], verbose=False)
    assert found.runs[0].diverged and found.verdict().startswith("FP32 itself diverged with 1 of 1 seeds")
    assert found.table() and found.figure()


def test_an_interruption_keeps_the_seeds_that_are_done(buffer):
    judged = []
    def evaluate(model):
        judged.append(model)
        if len(judged) > 2: raise KeyboardInterrupt
        return 1.0
    found = compare_precision(small_config(num_epochs=1, steps_per_epoch=1), buffer, (0, 1, 2), evaluate=evaluate, verbose=False)
    assert found.interrupted and {run.seed for run in found.runs} == {0} and "Stopped early: this is what 1 seed came to." in str(found)
    with pytest.raises(KeyboardInterrupt): compare_precision(small_config(num_epochs=1, steps_per_epoch=1), buffer, evaluate=evaluate, verbose=False)


# What is said; the numbers of a card are made up here

def made_up(fp32_seconds, amp_seconds, fp32_peak=1000, amp_peak=1000, fp32_scores=(), amp_scores=(), amp="True (FP16 mixed precision)", device="cuda:0"):
    "A comparison on a card, with numbers made up for the purpose."
    runs = []
    for seed in range(3):
        for precision, seconds, peak, scores, in_effect in (("fp32", fp32_seconds, fp32_peak, fp32_scores, "False (use_amp is false)"), ("float16", amp_seconds, amp_peak, amp_scores, amp)):
            runs.append(Run(seed, precision, in_effect, steps=10, epoch_seconds=[99.0] + [seconds] * 3, epoch_loss=[1.0] * 4, epoch_scale=[math.nan] * 4, peak_bytes=peak, last_score=scores[seed] if scores else None))
    return Comparison({}, runs, {"device": device})


@pytest.mark.parametrize("numbers, told", [
    ((2, 1), "float16 pays here: 2.00 times the speed of FP32 (middle half of 9 pairs of epochs: 2.00 to 2.00) and 1.00 times its peak memory; policies were not judged."),
    ((2, 2, 1000, 600), "float16 pays in memory only here: 1.00 times the speed"),
    ((2, 4, 1000, 600), "float16 pays in memory only and costs speed here: 0.50 times the speed"),
    ((2, 1.95), "float16 does not pay here: 1.03 times the speed"),
    ((2, 1, 1000, 1000, (0.9, 0.9, 0.9), (0.8, 0.7, 0.75)), "float16 does not pay here: 2.00 times the speed of FP32 (middle half of 9 pairs of epochs: 2.00 to 2.00) and 1.00 times its peak memory; the score is lower (-0.150, 95% interval -0.274 to -0.026 over 3 seeds)."),
    ((2, 1, 1000, 1000, (0.9, 0.9, 0.9), (0.9, 0.8, 0.95)), "float16 pays here: 2.00 times the speed of FP32 (middle half of 9 pairs of epochs: 2.00 to 2.00) and 1.00 times its peak memory; no difference is seen in the score (-0.017, 95% interval -0.206 to +0.173 over 3 seeds)."),
    ((2, 1, 1000, 1000, (0.7, 0.7, 0.7), (0.8, 0.9, 0.85)), "the score is higher (+0.150"),
    ((2, 1, 1000, 1000, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)), "the score is the same in all 3 seeds."),
    ((2, 1, 1000, 1000, (1.0, 1.0, 1.0), (0.75, 0.75, 0.75)), "float16 pays here: 2.00 times the speed of FP32 (middle half of 9 pairs of epochs: 2.00 to 2.00) and 1.00 times its peak memory; the score differs by -0.250 in all 3 seeds, which is too coarse to judge."),
])
def test_the_verdict_of_a_card(numbers, told):
    assert told in made_up(*numbers).verdict() and made_up(*numbers).verdict().count(".") - len(re.findall(r"\d\.\d", made_up(*numbers).verdict())) == 1


def test_a_precision_that_was_not_in_effect_is_not_praised():
    idle = made_up(2, 1, amp="False (GeForce computes NaN in float16)")
    assert idle.verdict() == "float16 was not in effect: GeForce computes NaN in float16."


def test_the_verdict_of_a_cpu_speaks_of_numerics_only(comparison):
    told = comparison.verdict()
    assert told.startswith("On a CPU the speed figures mean nothing for a graphics card, so this compares numerics only: float16 keeps ")
    assert "pay" not in told and "times the speed" not in told and "; bfloat16 keeps " in told and told.endswith(".")
    assert comparison.machine["device"] == "cpu"


def test_speed_ratios_pair_the_epochs_and_leave_out_the_first():
    assert made_up(3, 2).speed_ratios("float16").tolist() == [1.5] * 9
    single = Comparison({}, [Run(0, "fp32", epoch_seconds=[4.0]), Run(0, "float16", epoch_seconds=[2.0])])
    assert single.speed_ratios("float16").tolist() == [2.0]


# On disk

def test_a_saved_comparison_says_the_same(comparison, tmp_path):
    comparison.save(tmp_path / "kept")
    loaded = Comparison.load(tmp_path / "kept")
    assert str(loaded) == str(comparison) and loaded.config == comparison.config and loaded.machine == comparison.machine
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"comparison.json", "comparison.md", "comparison.png"}
    text = (tmp_path / "kept" / "comparison.json").read_text(encoding="utf-8")
    assert "NaN" not in text and text.count("\n") == len(comparison.runs) + 2
    for broken in ("{", "[]", '{"format": "other", "version": 1}', text.replace('"version": 1', '"version": 2')):
        (tmp_path / "kept" / "comparison.json").write_text(broken, encoding="utf-8")
        with pytest.raises(ComparisonFileError, match="no comparison that can be read"): Comparison.load(tmp_path / "kept")


# The command

STRICT = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error,ignore::EncodingWarning:matplotlib.font_manager"}


def command(*args):
    "The command, as it is installed beside this Python."
    return [shutil.which("autowzry_compare", path=sysconfig.get_path("scripts")), *map(str, args)]


def run(*args, cwd, code=0):
    "Run the command to its end and return what it printed."
    done = subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, encoding="utf-8", env=STRICT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory, buffer):
    "A folder with a small buffer and settings for a run of seconds."
    place = tmp_path_factory.mktemp("对局 1")
    buffer.save(place / "battles")
    small_config(num_epochs=2, steps_per_epoch=3).save_yaml(place / "small.yaml")
    return place


def test_the_command_prints_table_figure_and_verdict(place):
    told = run("--config", "small.yaml", "--buffer", "battles", "--seeds", 2, "--battles", 2, "--precisions", "float16, bfloat16", "--out", "out", cwd=place)
    assert "[Compare] fp32, float16, bfloat16 on cpu: 2 seeds, 2 epochs of 3 steps, batches of 4" in told and "amp_on_cpu" in told
    figure, table, verdict = told.strip().split("\n\n")[-3:]
    assert table.startswith("| ") and "win rate over 2 battles, best model" in table
    assert (place / figure.removeprefix("Figure: ")).read_bytes().startswith(b"\x89PNG") and verdict.startswith("On a CPU the speed figures mean nothing")
    assert str(Comparison.load(place / "out")).split("\n\n") == [table, verdict]


@pytest.mark.skipif(os.name == "nt", reason="a signal that is Ctrl-C to one process alone does not exist on Windows")
def test_ctrl_c_keeps_the_seeds_that_are_done(place):
    process = subprocess.Popen(command("--config", "small.yaml", "--buffer", "battles", "--seeds", 10000, "--battles", 1, "--out", "cut"), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env={**STRICT, "PYTHONUNBUFFERED": "1"})
    for line in process.stdout:
        if line.startswith("  Seed 1"): break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    told, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error and "autowzry_compare: stopped." in error, error
    found = Comparison.load(place / "cut")
    assert found.interrupted and len(found.runs) >= 4 and found.verdict() in told


@pytest.mark.parametrize("args, told", [
    (["--precisions", "fp16"], "allowed are fp32, float16 and bfloat16"),
    (["--seeds", "0"], "--seeds"),
    (["--epochs", "0"], "--epochs"),
    (["--battles", "0"], "--battles"),
    (["--mode", "tiny"], "mini, full or high"),
    (["--device", "cuda:77"], "cuda:77"),
    (["--config", "nothing.yaml"], "nothing.yaml"),
    (["--buffer", "nothing"], "nothing"),
    (["--out", "small.yaml"], "is a file"),
])
def test_a_bad_option_is_one_line(place, args, told):
    error = run("--buffer", "battles", *args, cwd=place, code=1)
    assert told in error and error.startswith("autowzry_compare: ") and error.count("\n") == 1, error
    assert not (place / "runs").exists()

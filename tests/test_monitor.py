"""The diagnosis, on histories of real runs: every kind of finding, and what must not be found in a healthy run."""
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from autowzry_agent.buffer import TrainingBuffer
from autowzry_agent.config import Config
from autowzry_agent.environment import LANE_ID, evaluate, make_env, record, scripted_policy
from autowzry_agent.monitor import LEVELS, Diagnosis, Finding, diagnose, plot_history, plot_loss, plot_scale
from autowzry_agent.trainer import History, Trainer, TrainingDiverged

STUDY = {"use_amp": True, "amp_on_cpu": True}
STUDIED = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "precision_study" / "comparison.json"


@pytest.fixture(scope="module")
def buffer(): return record(make_env(LANE_ID), scripted_policy(), steps=300, frame_shape=(3, 32, 32), progress=False)


def small_config(**changes):
    "A run of seconds."
    return Config(**{**dict(model_mode="mini", input_shape=(3, 32, 32), batch_size=4, num_epochs=4, steps_per_epoch=12, target_update_epochs=2,
        use_amp=False, device="cpu", learning_rate=5e-4, evaluate_epochs=100), **changes})


def with_rewards(buffer, change):
    "The same battles with other rewards."
    other = TrainingBuffer(None, buffer.frame_shape, buffer.num_actions)
    for first, number in buffer.battles:
        start, steps = buffer.transition_frames[first], slice(first, first + number)
        other.add_episode(buffer.frames[start:start + number + 1], buffer.actions[steps], change(buffer.rewards[steps]), bool(buffer.terminated[steps][-1]))
    return other


def run(config, buffer, evaluate=None):
    "Train; the history of a run that diverged counts as well."
    trainer = Trainer(config, verbose=False)
    try: trainer.train(buffer, evaluate)
    except TrainingDiverged: pass
    return trainer.history


def kinds(history, config): return [finding.kind for finding in diagnose(history, config)]


def found(kind, history, config):
    "The one finding of a kind."
    (one,) = [finding for finding in diagnose(history, config) if finding.kind == kind]
    return one


@pytest.fixture(scope="module")
def healthy(buffer):
    "An FP32 run, and the settings it had."
    config = small_config()
    return run(config, buffer), config


# The scale

@pytest.mark.parametrize("changes, kind, level, told", [
    ({"init_scale": 64, "growth_interval": 4}, "scale rising", "good", "grown 6 times, halved 0 times"),
    ({"init_scale": 2.0**17, "growth_interval": 8, "num_epochs": 8}, "scale ranging", "good", "halved"),
    ({"init_scale": 256}, "scale unsettled", "note", "256 -> 256 in 48 steps, the last 48 without an overflow"),
])
def test_a_scale_is_told_by_its_shape(buffer, changes, kind, level, told):
    config = small_config(**STUDY, **changes)
    one = found(kind, run(config, buffer), config)
    assert one.level == level and told in one.evidence and not one.advice


def test_a_scale_that_falls_is_a_problem_and_its_steps_too(buffer):
    dice = np.random.default_rng(0)
    config = small_config(**STUDY, loss="mse", num_epochs=5, steps_per_epoch=16, init_scale=2.0**19)
    history = run(config, with_rewards(buffer, lambda rewards: np.where(dice.random(len(rewards)) < 0.04, 1e30, rewards)))
    diagnosis = diagnose(history, config)
    assert [finding[:2] for finding in diagnosis[:2]] == [("scale falling", "problem"), ("skipped steps", "problem")]
    advice = diagnosis[0].advice
    assert advice.startswith("1. Look for rewards") and "0.0005 -> 0.00025" in advice and "loss: huber" in advice and "use_amp: false" in advice
    assert f"{history.skipped} of 80 steps skipped" in diagnosis[1].evidence and diagnosis.verdict.startswith("Something needs a change: 2 problems")


def test_the_search_for_a_first_scale_is_no_trouble(buffer):
    config = small_config(**STUDY, init_scale=2.0**24)
    history = run(config, buffer)
    one = found("skipped steps", history, config)
    assert 0 < history.skipped < 15 and one.level == "good" and "came down to a scale that fits" in one.text and "problem" not in [finding.level for finding in diagnose(history, config)]


def test_a_scale_that_grows_too_often_is_told_which_interval_is_usual(buffer):
    config = small_config(**STUDY, init_scale=2.0**17, growth_interval=8, num_epochs=8)
    one = found("skipped steps", run(config, buffer), config)
    assert one.level == "note" and "growth_interval (8 -> 2000)" in one.advice


# The loss

def test_a_healthy_run_is_told_what_is_good(healthy):
    history, config = healthy
    diagnosis = diagnose(history, config)
    assert [finding[:2] for finding in diagnosis] == [("loss finite", "good"), ("precision", "good")] and diagnosis.verdict == "No problem found: 2 good."


def test_a_learning_rate_that_moves_nothing_is_a_problem(buffer):
    config = small_config(learning_rate=1e-12, num_epochs=8, steps_per_epoch=1, batch_size=256)
    one = found("loss flat", run(config, buffer), config)
    assert one.level == "problem" and "learning_rate (1e-12 -> 0.0001)" in one.advice


def test_a_loss_that_stands_still_is_flat_and_one_that_learns_is_not(buffer):
    "The same data in every epoch; an optimizer that does nothing stands still."
    few = TrainingBuffer(None, buffer.frame_shape, buffer.num_actions)
    few.add_episode(buffer.frames[:65], buffer.actions[:64], buffer.rewards[:64], True)
    config = small_config(batch_size=8, num_epochs=8, steps_per_epoch=None)
    idle = Trainer(config, verbose=False)
    idle.optimizer.param_groups[0]["lr"] = 0.0
    assert found("loss flat", idle.train(few), config).level == "note"
    assert "loss finite" in kinds(run(config, few), config)


def test_runs_that_learned_to_win_are_not_called_flat_or_growing(healthy):
    "The losses of the long comparison fall by a few hundredths at most while the runs learn to win: without scores that is a note at worst."
    history, config = healthy
    studied = json.loads(STUDIED.read_text(encoding="utf-8"))["runs"]
    assert len(studied) == 10 and all(saved["last_score"] > 0.5 for saved in studied)
    for saved in studied:
        won = replace(history, epoch_loss=saved["epoch_loss"])
        assert {finding.level for finding in diagnose(won, config)} <= {"note", "good"}
        assert kinds(replace(won, scores={2: 0.1, 24: saved["last_score"]}), config) == ["loss finite", "precision"]


def test_a_loss_that_was_trained_on_though_not_finite_is_named(buffer):
    "A history from a trainer without a guard: the guard's note of it is taken out of a real one."
    config = small_config(learning_rate=1e20)
    diverged = run(config, buffer)
    unguarded = replace(diverged, events=[])
    one = found("loss not finite", unguarded, config)
    first = int(np.flatnonzero(~np.isfinite(diverged.loss))[0]) + 1
    assert one.level == "problem" and f"step {first}, epoch 1," in one.evidence and "1e+20 -> 5e+19" in one.advice


def test_rewards_of_another_size_make_the_loss_grow(buffer):
    config = small_config(num_epochs=6)
    trainer = Trainer(config.replace(num_epochs=2), verbose=False)
    trainer.train(buffer)
    trainer.config = config
    trainer.train(with_rewards(buffer, lambda rewards: rewards * 1000))
    one = found("loss growing", trainer.history, config)
    assert one.level == "note" and "target_update_epochs 2 -> 4" in one.advice


def test_scores_stand_beside_the_loss(buffer):
    config, lane = small_config(evaluate_epochs=2), make_env(LANE_ID)
    history = run(config, buffer, lambda model: evaluate(model, lane, 2, seed=0).mean_return)
    assert "score " in found("loss finite", history, config).evidence


# Divergence

@pytest.mark.parametrize("precision", [{}, STUDY], ids=["FP32", "FP16"])
def test_a_run_that_ended_in_divergence_comes_first(buffer, precision):
    config = small_config(**precision, learning_rate=1e20)
    history = run(config, buffer)
    one = diagnose(history, config)[0]
    assert one[:2] == ("diverged", "problem") and f"{len(history.loss)} steps thrown away" in one.evidence and "1e+20 -> 5e+19" in one.advice
    assert ("on_divergence: fp32" in one.advice) == bool(precision)
    assert "loss not finite" not in kinds(history, config)


@pytest.fixture(scope="module")
def fallback(buffer):
    "Good for two epochs, then rewards that FP16 can't hold: the run goes on in FP32."
    config = small_config(**STUDY, init_scale=64, loss="mse", on_divergence="fp32", num_epochs=6)
    trainer = Trainer(config.replace(num_epochs=2), verbose=False)
    trainer.train(buffer)
    trainer.config = config
    return trainer.train(with_rewards(buffer, lambda rewards: 1e6 * (1 + rewards))), config


def test_a_run_that_went_on_without_amp_says_so(fallback):
    history, config = fallback
    one = found("diverged", history, config)
    assert one.level == "note" and "on in FP32" in one.text and "the scale fell below 1" in one.evidence and "diverged" in found("amp not in effect", history, config).text


def test_a_run_that_diverged_in_fp32_as_well_ended_in_a_problem(buffer):
    config = small_config(**STUDY, on_divergence="fp32", learning_rate=1e20)
    history = run(config, buffer)
    assert len(history.events) == 2 and history.precision.startswith("False (AMP diverged")
    assert diagnose(history, config)[0][:2] == ("diverged", "problem")


def test_a_run_of_skipped_steps_alone_is_a_problem(buffer):
    config = small_config(**STUDY, num_epochs=1, steps_per_epoch=10, loss="mse")
    history = run(config, with_rewards(buffer, lambda rewards: np.full_like(rewards, 1e30)))
    one = found("skipped steps", history, config)
    assert history.skipped == 10 and one.level == "problem" and "nothing has been learned" in one.text


def test_a_scale_that_grew_and_was_halved_long_after_is_ranging(healthy):
    "Growths are rare at the usual interval: this shape takes 4,100 steps, so it is written into a real history."
    scale = np.repeat(np.float32([65536, 131072, 65536]), [2000, 150, 1950])
    history = replace(healthy[0], epoch=np.ones(4100, np.int32), loss=np.ones(4100, np.float32), scale=scale, step_skipped=np.arange(4100) == 2150, precision="True (FP16 mixed precision)")
    assert "scale ranging" in kinds(history, healthy[1].replace(use_amp=True))


def test_thrown_away_steps_are_hatched_and_left_out_of_the_average(fallback):
    history, _ = fallback
    left, right = plot_history(history).axes
    for ax in (left, right): assert "thrown away" in [text.get_text() for text in ax.get_legend().get_texts()]
    faint, strong = left.lines[:2]
    for line in (faint, strong): np.testing.assert_array_equal(np.isnan(line.get_ydata()), history.abandoned)
    refreshed = [line.get_xdata()[0] for line in left.lines if line.get_linestyle() == ":"]
    assert len(refreshed) == len(history.target_updates) and not any(history.abandoned[int(step) - 1] for step in refreshed)


def test_a_run_of_which_all_was_thrown_away_can_still_be_seen(buffer):
    history = run(small_config(learning_rate=1e20), buffer)
    ax = Figure().subplots()
    plot_loss(history, ax)
    assert np.isfinite(ax.lines[0].get_ydata()).any() and history.abandoned.all()
    assert plot_history(history)._repr_png_()


# The machine

def test_amp_that_is_not_in_effect_has_its_reason(buffer):
    config = small_config(use_amp=True)
    one = found("amp not in effect", run(config, buffer), config)
    assert one.level == "note" and "Using AMP: False (" in one.evidence and one.advice


CARD = {"device": "cuda:0", "name": "NVIDIA GeForce RTX 3060", "compute_capability": [8, 6], "frames": "cuda:0"}


@pytest.mark.parametrize("machine, batch_size, expected", [
    ({}, 32, ["machine"]),
    ({"name": "NVIDIA GeForce GTX 1080", "compute_capability": [6, 1]}, 32, ["no tensor cores"]),
    ({"name": "NVIDIA GeForce GTX 1660 SUPER", "compute_capability": [7, 5]}, 32, ["no tensor cores"]),
    ({}, 8, ["small batch"]),
    ({"frames": "pinned memory"}, 64, ["frames not on the device"]),
    ({"frames": "disk"}, 64, ["frames not on the device"]),
])
def test_what_a_card_is_told(healthy, machine, batch_size, expected):
    "A real history; the card is written in, since there is none here."
    history, config = healthy
    history = replace(history, machine={**CARD, **machine}, precision="True (FP16 mixed precision)")
    speed = {"machine", "no tensor cores", "small batch", "frames not on the device"}
    assert [kind for kind in kinds(history, config.replace(use_amp=True, batch_size=batch_size)) if kind in speed] == expected


def test_a_history_from_before_machines_were_noted_says_nothing_of_speed(healthy):
    history, config = healthy
    assert kinds(replace(history, machine={}), config) == ["loss finite", "precision"]


# As it is shown

def test_a_saved_history_has_the_same_diagnosis(fallback, tmp_path):
    history, config = fallback
    history.save(tmp_path)
    assert diagnose(History.load(tmp_path), config) == diagnose(history, config)


def test_problems_stand_first_and_fit_a_narrow_terminal(fallback, buffer):
    config = small_config(learning_rate=1e20, use_amp=True)
    for history, settings in (fallback, (run(config, buffer), config)):
        diagnosis = diagnose(history, settings)
        levels = [LEVELS.index(finding.level) for finding in diagnosis]
        assert levels == sorted(levels) and all(finding.evidence for finding in diagnosis)
        assert max(map(len, str(diagnosis).splitlines())) <= 79 and str(diagnosis).isascii()
        assert all(finding.advice for finding in diagnosis if finding.level == "problem")


def test_the_table_escapes_what_it_shows_and_names_the_level():
    html = Diagnosis([Finding("kind", "problem", "a < b", "<script>", "x & y")])._repr_html_()
    assert "a &lt; b" in html and "&lt;script&gt;" in html and "x &amp; y" in html and "PROBLEM" in html


def test_an_empty_history_is_no_error():
    assert kinds(History(), Config()) == ["no steps"]
    ax = Figure().subplots()
    plot_scale(History(), ax)
    assert math.isnan(History().scale.sum()) or not len(History().scale)

"""The trainer as a whole: its log, its precision, what it keeps and what it survives."""
import copy
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from autowzry_agent.buffer import TrainingBuffer
from autowzry_agent.config import Config, ConfigError
from autowzry_agent.environment import LANE_ID, make_env, record, scripted_policy
from autowzry_agent.model import LightweightDQN, ModelFileError, load_model
from autowzry_agent.trainer import History, Precision, Trainer, read_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
STUDY = {"use_amp": True, "amp_on_cpu": True}


@pytest.fixture(scope="module")
def buffer():
    "Three hundred transitions of the built-in battle."
    return record(make_env(LANE_ID), scripted_policy(), steps=300, frame_shape=(3, 32, 32), progress=False)


def small_config(**changes):
    "A run of seconds."
    return Config(**{**dict(model_mode="mini", input_shape=(3, 32, 32), batch_size=4, num_epochs=3, steps_per_epoch=4,
        target_update_epochs=2, use_amp=False, device="cpu", learning_rate=5e-4), **changes})


# The log

def test_log_has_its_exact_form(buffer, capsys):
    Trainer(small_config(num_epochs=12, steps_per_epoch=1, target_update_epochs=5)).train(buffer)
    lines = re.sub(r"\d\.\d{4}", "0.0000", capsys.readouterr().out)
    assert lines == (
        "[Trainer] Init\n"
        "  Device: cpu\n"
        "  Using Target Network: True\n"
        "  Using AMP: False (use_amp is false)\n"
        "\n"
        "[Train] Starting training...\n"
        "  Epoch 1/12, Avg Loss: 0.0000\n"
        "  Epoch 5/12, Avg Loss: 0.0000 [Target Network Updated]\n"
        "  Epoch 10/12, Avg Loss: 0.0000 [Target Network Updated]\n")


def test_log_under_amp_shows_the_scale(buffer, capsys):
    Trainer(small_config(**STUDY, num_epochs=2, steps_per_epoch=2, growth_interval=2, init_scale=1024)).train(buffer)
    lines = re.sub(r"\d\.\d{4}", "0.0000", capsys.readouterr().out)
    assert "  Using AMP: True (FP16 mixed precision)\n" in lines
    assert "  Epoch 1/2, Avg Loss: 0.0000, Scale: 2048\n" in lines
    assert "  Epoch 2/2, Avg Loss: 0.0000, Scale: 4096 [Target Network Updated]\n" in lines


def test_log_under_bfloat16_has_no_scale(buffer, capsys):
    trainer = Trainer(small_config(**STUDY, amp_dtype="bfloat16", use_target_network=False))
    trainer.train(buffer)
    lines = capsys.readouterr().out
    assert "  Using Target Network: False\n  Using AMP: True (BF16 mixed precision)\n" in lines
    assert "Scale" not in lines and trainer.use_amp and trainer.scaler is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_amp_without_cuda_is_fp32_with_a_reason_and_without_a_warning():
    code = """
from autowzry_agent.config import Config
from autowzry_agent.environment import LANE_ID, make_env, record, scripted_policy
from autowzry_agent.trainer import Trainer
buffer = record(make_env(LANE_ID), scripted_policy(), steps=40, frame_shape=(3, 32, 32), progress=False)
trainer = Trainer(Config(model_mode='mini', input_shape=(3, 32, 32), batch_size=4, num_epochs=2, steps_per_epoch=2, use_amp=True))
trainer.train(buffer)
assert trainer.scaler is None and not trainer.use_amp and trainer.config.use_amp
"""
    done = subprocess.run([sys.executable, "-X", "warn_default_encoding", "-W", "error", "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "Using AMP: False (CUDA is not available)" in done.stdout
    assert "Warning" not in done.stderr


# Precision

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_amp_on_cpu_computes_in_sixteen_bits(buffer, dtype):
    trainer = Trainer(small_config(**STUDY, amp_dtype=dtype), verbose=False)
    training, acting = {}, {}
    for name, layer in trainer.model.named_modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)):
            layer.register_forward_hook(lambda layer, inputs, output, name=name: (training if layer.training else acting).setdefault(name, set()).add(output.dtype))
    trainer.train(buffer)
    assert len(training) == 7 and all(types == {getattr(torch, dtype)} for types in training.values())
    assert len(acting) == 7 and all(types == {torch.float32} for types in acting.values())
    for parameter in trainer.model.parameters(): assert parameter.dtype == torch.float32 and parameter.grad.dtype == torch.float32
    assert (type(trainer.scaler) is torch.amp.GradScaler) == (dtype == "float16")


def test_fp32_computes_in_fp32(buffer):
    trainer = Trainer(small_config(amp_on_cpu=True), verbose=False)
    seen = set()
    trainer.model.trunk[0][0].register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))
    trainer.train(buffer)
    assert seen == {torch.float32} and np.isnan(trainer.history.scale).all()


def test_amp_needs_model_and_batches_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config, cpu, cuda = small_config(use_amp=True), torch.device("cpu"), torch.device("cuda", 0)
    assert str(Precision(config, cpu)) == "False (the model is on cpu)"
    from autowzry_agent.trainer import amp_decision
    assert amp_decision(config, cuda, cpu) == (False, "the batches are on cpu")
    assert amp_decision(config, cuda, cuda) == (True, "")
    assert amp_decision(config.replace(amp_on_cpu=True), cuda, cpu) == (False, "the batches are on cpu")


def test_precision_is_decided_again_before_the_first_step(buffer, capsys):
    trainer = Trainer(small_config(use_amp=True))
    trainer.config = trainer.config.replace(amp_on_cpu=True)
    next(trainer.epochs(buffer))
    assert "  Using AMP: True (FP16 mixed precision)\n" in capsys.readouterr().out and trainer.use_amp


def test_forced_overflow_halves_the_scale_and_skips_the_step(buffer):
    trainer = Trainer(small_config(**STUDY, init_scale=2.0**40, num_epochs=1), verbose=False)
    before = copy.deepcopy(trainer.model.state_dict())
    history = trainer.train(buffer)
    assert history.skipped == 4 and history.step_skipped.all()
    assert history.scale.tolist() == [2.0**39, 2.0**38, 2.0**37, 2.0**36] and history.epoch_scale == [2.0**36]
    assert math.isnan(history.epoch_loss[0])
    for name, value in trainer.model.state_dict().items(): assert torch.equal(value, before[name]), name


def test_amp_and_fp32_learn_the_same(buffer):
    losses = [Trainer(small_config(**settings, init_scale=1024), verbose=False).train(buffer).loss for settings in ({}, STUDY)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02, atol=0.005)
    assert not np.array_equal(losses[0], losses[1])


# Learning

def test_a_buffer_on_disk_trains_the_same(buffer, tmp_path):
    buffer.save(tmp_path / "数据 1")
    losses = [Trainer(small_config(), verbose=False).train(held).loss for held in (buffer, TrainingBuffer.load(tmp_path / "数据 1"), TrainingBuffer.load(tmp_path / "数据 1", mmap=True))]
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_array_equal(losses[0], losses[2])


def test_other_random_numbers_do_not_disturb_a_run(buffer):
    torch.manual_seed(1)
    first = Trainer(small_config(), verbose=False).train(buffer).loss
    torch.manual_seed(2)
    drawn = torch.rand(1)
    second = Trainer(small_config(), verbose=False).train(buffer).loss
    np.testing.assert_array_equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(torch.rand(1), drawn)


def test_seed_changes_the_run(buffer):
    assert not np.array_equal(*(Trainer(small_config(seed=seed), verbose=False).train(buffer).loss for seed in (0, 1)))


def test_only_the_gradient_forward_moves_the_statistics(buffer):
    trainer = Trainer(small_config(double_dqn=True, num_epochs=1), verbose=False)
    target = copy.deepcopy(trainer.target_model.state_dict())
    trainer.train(buffer)
    assert int(trainer.model.trunk[0][1].num_batches_tracked) == 4
    assert all(torch.equal(value, target[name]) for name, value in trainer.target_model.state_dict().items())


def test_refreshed_target_has_the_statistics_too(buffer):
    trainer = Trainer(small_config(num_epochs=2), verbose=False)
    history = trainer.train(buffer)
    assert history.target_updates == [2]
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in trainer.target_model.state_dict().items())


def test_steps_per_epoch_none_is_one_pass(buffer):
    history = Trainer(small_config(steps_per_epoch=None, num_epochs=1, batch_size=64), verbose=False).train(buffer)
    assert len(history.loss) == math.ceil(len(buffer) / 64)


def test_best_model_is_kept(buffer):
    trainer, scores, seen = Trainer(small_config(num_epochs=4, evaluate_epochs=2), verbose=False), iter([0.9, 0.1]), []
    trainer.train(buffer, lambda model: (seen.append(copy.deepcopy(model.state_dict())), next(scores))[1])
    assert trainer.best_score == 0.9 and trainer.history.scores == {2: 0.9, 4: 0.1}
    assert all(torch.equal(value, seen[0][name]) for name, value in trainer.best_model.state_dict().items())
    assert not torch.equal(trainer.best_model.trunk[0][0].weight, trainer.model.trunk[0][0].weight)


def test_evaluation_leaves_training_as_it_was(buffer):
    def evaluate(model):
        model.eval()
        with torch.no_grad(): model(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
        return 0.0
    np.testing.assert_array_equal(Trainer(small_config(), verbose=False).train(buffer, evaluate).loss, Trainer(small_config(), verbose=False).train(buffer).loss)


# Stopping, saving, loading

def test_stop_from_another_thread(buffer):
    trainer = Trainer(small_config(num_epochs=100_000), verbose=False)
    thread = threading.Thread(target=trainer.train, args=(buffer,))
    thread.start()
    deadline = time.monotonic() + 60
    while not trainer.epoch and thread.is_alive() and time.monotonic() < deadline: time.sleep(0.01)
    trainer.stop()
    thread.join(timeout=20)
    assert not thread.is_alive() and 0 < trainer.epoch < 100_000
    assert len(trainer.history.epoch_loss) == trainer.epoch


def test_checkpoint_is_there_before_the_first_step_and_when_evaluation_fails(buffer, tmp_path):
    trainer, seen = Trainer(small_config(), folder=tmp_path, verbose=False), []
    step = trainer.train_step
    trainer.train_step = lambda batch: (seen.append(read_checkpoint(tmp_path / "checkpoint.pt")["epoch"]), step(batch))[1]
    def fails(model): raise RuntimeError("the game crashed")
    with pytest.raises(RuntimeError, match="the game crashed"): trainer.train(buffer, fails)
    assert seen == [0, 0, 0, 0] and read_checkpoint(tmp_path / "checkpoint.pt")["epoch"] == 1


def assert_same_run(saved, whole):
    "A checkpoint holds what an uninterrupted trainer has."
    for name in ("loss", "scale", "epoch"): np.testing.assert_array_equal(saved["history"][name].numpy(), getattr(whole.history, name))
    for name in ("epoch_loss", "epoch_scale", "scores", "target_updates"): np.testing.assert_equal(saved["history"][name], getattr(whole.history, name))
    for part, mine in (("model", whole.model.state_dict()), ("target_model", whole.target_model.state_dict()), ("best_weights", whole.best_model.state_dict())):
        assert all(torch.equal(value, saved[part][name]) for name, value in mine.items()), part
    for number, state in whole.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, saved["optimizer"]["state"][number][name]) for name, value in state.items())
    assert saved["scaler"] == whole.precision.grad_scaler.state_dict() and saved["best_score"] == whole.best_score


SCORES = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.6}


@pytest.mark.parametrize("settings", [{}, {**STUDY, "growth_interval": 3}], ids=["FP32", "FP16"])
def test_resumed_in_another_process_equals_uninterrupted(buffer, tmp_path, settings):
    config = small_config(**settings, num_epochs=4, target_update_epochs=3)
    whole = Trainer(config, verbose=False)
    whole.train(buffer, lambda model: SCORES[whole.epoch])
    first = Trainer(config, folder=tmp_path, verbose=False)
    for result in first.epochs(buffer, lambda model: SCORES[first.epoch]):
        if result.epoch == 2: break
    buffer.save(tmp_path / "buffer")
    config.save_yaml(tmp_path / "config.yaml")
    code = f"""
import sys, torch
from autowzry_agent.buffer import TrainingBuffer
from autowzry_agent.config import Config
from autowzry_agent.trainer import Trainer
torch.set_num_threads({torch.get_num_threads()})
trainer = Trainer(Config.from_yaml('config.yaml'), verbose=False)
trainer.load_checkpoint('checkpoint.pt')
trainer.train(TrainingBuffer.load('buffer'), lambda model: {SCORES}[trainer.epoch])
trainer.save_checkpoint('resumed.pt')
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert_same_run(read_checkpoint(tmp_path / "resumed.pt"), whole)


@pytest.mark.parametrize("settings", [{}, STUDY], ids=["FP32", "FP16"])
def test_stopped_in_the_middle_of_an_epoch_goes_on_with_the_next_batch(buffer, tmp_path, settings):
    config, steps = small_config(**settings, num_epochs=4), []
    whole = Trainer(config, verbose=False)
    whole.train(buffer, lambda model: SCORES[whole.epoch])
    trainer = Trainer(config, verbose=False)
    step = trainer.train_step
    def stopping_step(batch):
        steps.append(batch)
        if len(steps) in (2, 7): trainer.stop()
        return step(batch)
    trainer.train_step = stopping_step
    for epoch, done in ((0, 2), (1, 7), (4, 16)):
        trainer.train(buffer, lambda model: SCORES[trainer.epoch])
        assert (trainer.epoch, len(trainer.history.loss)) == (epoch, done)
    trainer.save_checkpoint(tmp_path / "checkpoint.pt")
    assert_same_run(read_checkpoint(tmp_path / "checkpoint.pt"), whole)


def test_epochs_made_shorter_than_what_is_done_of_one_go_on_with_the_next(buffer):
    trainer, steps = Trainer(small_config(num_epochs=2), verbose=False), []
    step = trainer.train_step
    trainer.train_step = lambda batch: (steps.append(batch), len(steps) == 3 and trainer.stop(), step(batch))[2]
    trainer.train(buffer)
    trainer.config = trainer.config.replace(steps_per_epoch=2)
    trainer.train(buffer)
    assert trainer.epoch == 2 and trainer.history.epoch.tolist() == [1, 1, 1, 2, 2]


def test_on_step_sees_the_run_as_far_as_it_is(buffer):
    trainer, seen = Trainer(small_config(), verbose=False), []
    def look():
        trainer.read_steps()
        seen.append((trainer.progress, len(trainer.history.loss), trainer.history.epoch[-1]))
    assert trainer.progress == (0, None)
    trainer.train(buffer, on_step=look)
    assert seen == [((step, 12), step, (step + 3) // 4) for step in range(1, 13)]
    whole = Trainer(small_config(), verbose=False).train(buffer)
    np.testing.assert_array_equal(trainer.history.loss, whole.loss)
    assert trainer.history.epoch_loss == whole.epoch_loss


def test_stop_before_the_training_is_not_lost(buffer):
    trainer = Trainer(small_config(), verbose=False)
    trainer.stop()
    trainer.train(buffer)
    assert trainer.epoch == 0 and len(trainer.history.loss) == 0
    trainer.train(buffer)
    assert trainer.epoch == 3


def test_an_interrupted_step_leaves_a_trainer_that_goes_on(buffer, monkeypatch):
    trainer = Trainer(small_config(**STUDY), verbose=False)
    def interrupted(*args): raise KeyboardInterrupt  # between unscaling and the update
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.nn.utils, "clip_grad_norm_", interrupted)
        trainer.train(buffer)
    trainer.train(buffer)
    assert trainer.epoch == 3 and trainer.scaler.get_scale() == 65536


def test_an_interrupted_evaluation_is_made_up_for(buffer, tmp_path):
    def interrupted(model): raise KeyboardInterrupt
    trainer = Trainer(small_config(num_epochs=1), folder=tmp_path, verbose=False)
    with pytest.raises(KeyboardInterrupt): trainer.train(buffer, interrupted)
    resumed = Trainer(small_config(num_epochs=1), verbose=False)
    resumed.load_checkpoint(tmp_path / "checkpoint.pt")
    resumed.train(buffer, lambda model: 0.7)
    assert resumed.history.scores == {1: 0.7} and resumed.best_model is not None


def test_an_fp32_checkpoint_goes_on_under_amp_and_back(buffer, tmp_path, capsys):
    Trainer(small_config(), folder=tmp_path, verbose=False).train(buffer)
    amp = Trainer(small_config(**STUDY, num_epochs=4, init_scale=1024), folder=tmp_path)
    amp.load_checkpoint(tmp_path / "checkpoint.pt")
    assert "  The checkpoint has no scaler (FP32): a fresh one starts at 1024\n" in capsys.readouterr().out
    amp.train(buffer)
    assert amp.history.scale[-1] == 1024 and np.isnan(amp.history.scale[0])
    fp32 = Trainer(small_config(num_epochs=5), verbose=False)
    fp32.load_checkpoint(tmp_path / "checkpoint.pt")
    fp32.train(buffer)
    assert len(fp32.history.epoch_loss) == 5 and np.isnan(fp32.history.scale[-1])


def test_fp32_model_from_before_amp_loads_under_amp(buffer):
    config = Config(model_mode="mini", input_shape=(3, 44, 44), device="cpu", **STUDY)
    known = torch.load(FIXTURES / "fp32_mini_q_values.pt", weights_only=True)
    trainer = Trainer(config, verbose=False)
    trainer.load_model(FIXTURES / "fp32_mini.pt")
    assert trainer.use_amp
    for model in (trainer.model, trainer.target_model):
        with torch.no_grad(): torch.testing.assert_close(model.eval()(known["frames"]), known["q_values"])
    with pytest.raises(ModelFileError, match="full"): load_model(FIXTURES / "fp32_mini.pt", config.replace(model_mode="full"))


def test_saved_model_with_spaces_and_chinese_in_its_path(buffer, tmp_path):
    trainer = Trainer(small_config(), verbose=False)
    trainer.save_model(tmp_path / "我的 模型" / "最好 的.pt")
    again = load_model(tmp_path / "我的 模型" / "最好 的.pt")
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in again.state_dict().items())


def test_history_is_read_by_pandas(buffer, tmp_path):
    history = Trainer(small_config(**STUDY, init_scale=2.0**40), verbose=False).train(buffer)
    history.save(tmp_path / "历史 1")
    table = pd.read_csv(tmp_path / "历史 1" / "history.csv")
    assert list(table) == ["epoch", "step", "loss", "scale", "skipped"] and len(table) == 12
    np.testing.assert_array_equal(table.loss.to_numpy(np.float32), history.loss)
    assert table.skipped.sum() == history.skipped
    again = History.load(tmp_path / "历史 1")
    np.testing.assert_array_equal(again.scale, history.scale)
    assert (again.epoch_scale, again.target_updates, again.precision) == (history.epoch_scale, history.target_updates, history.precision)


@pytest.mark.parametrize("changes, told", [({"input_shape": (3, 40, 40)}, "40"), ({"num_actions": 5}, "5")])
def test_buffer_of_another_shape_is_refused_before_training(buffer, changes, told):
    with pytest.raises(ValueError, match=told): Trainer(small_config(**changes), verbose=False).epochs(buffer)


def test_model_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match="num_actions: the model has 4, the config 9"):
        Trainer(small_config(), LightweightDQN(4, "mini", (3, 32, 32)), verbose=False)


def test_a_model_in_eval_mode_is_trained_like_any_other(buffer):
    config = small_config()
    models = [Trainer(config, verbose=False).model for _ in range(2)]
    losses = [Trainer(config, model, verbose=False).train(buffer).loss for model in (models[0].train(), models[1].eval())]
    np.testing.assert_array_equal(*losses)


def test_a_buffer_of_one_transition_is_refused():
    one = TrainingBuffer(10, (3, 32, 32))
    one.add_episode(np.zeros((2, 3, 32, 32), np.uint8), [0], [0.0], True)
    with pytest.raises(ValueError, match="a batch needs two"): Trainer(small_config(), verbose=False).train(one)

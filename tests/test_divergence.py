"""What goes wrong while training, and what is left afterwards: hopeless settings, poisoned buffers, kills, interrupts, waits."""
import contextlib
import math
import multiprocessing
import os
import pickle
import random
import re
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch
from tqdm import tqdm

from autowzry_agent.buffer import BufferDataError, TrainingBuffer
from autowzry_agent.cli import autowzry_train
from autowzry_agent.config import Config, ConfigError
from autowzry_agent.environment import LANE_ID, evaluate, make_env, record, scripted_policy
from autowzry_agent.model import LightweightDQN, ModelFileError
from autowzry_agent.trainer import DeviceSetupError, History, Trainer, TrainingDiverged, _kernel_errors, read_checkpoint, resolve_device

STUDY = {"use_amp": True, "amp_on_cpu": True}
PRECISIONS = pytest.mark.parametrize("precision", [{}, STUDY], ids=["FP32", "FP16"])


@pytest.fixture(scope="module")
def lane(): return make_env(LANE_ID)


@pytest.fixture(scope="module")
def recorded(lane): return record(lane, scripted_policy(), steps=300, frame_shape=(3, 32, 32), progress=False)


@pytest.fixture
def buffer(recorded, tmp_path):
    "A copy that a test may spoil."
    recorded.save(tmp_path / "buffer")
    return TrainingBuffer.load(tmp_path / "buffer")


def small_config(**changes):
    "A run of seconds: 4 epochs of 100 steps."
    return Config(**{**dict(model_mode="mini", input_shape=(3, 32, 32), batch_size=4, num_epochs=4, steps_per_epoch=100,
        target_update_epochs=2, use_amp=False, device="cpu", learning_rate=5e-4), **changes})


def set_reward(buffer, transition, reward):
    "Write into the array that the buffer itself trains from."
    buffer._steps["reward"][buffer.transition_frames[transition]] = reward


def assert_sound(trainer, lane, folder=None):
    "Weights and statistics are finite in memory and on disk, and one can play with them."
    for state in (trainer.model.state_dict(), trainer.target_model.state_dict()): assert all(value.isfinite().all() for value in state.values())
    for state in trainer.optimizer.state.values(): assert all(value.isfinite().all() for value in state.values())
    if folder:
        saved = read_checkpoint(folder / "checkpoint.pt")
        assert all(value.isfinite().all() for part in ("model", "target_model") for value in saved[part].values())
        for name, value in trainer.model.state_dict().items(): assert torch.equal(value, saved["model"][name])
        trainer.save_model(folder / "model.pt")
    frames = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad(): assert trainer.model.eval()(frames).isfinite().all()
    assert math.isfinite(evaluate(trainer.model, lane, episodes=2, seed=0).mean_return)


# Hopeless and poisoned runs

@PRECISIONS
def test_a_hopeless_learning_rate_ends_in_the_error(buffer, lane, tmp_path, precision):
    trainer = Trainer(small_config(**precision, learning_rate=1e20), folder=tmp_path, verbose=False)
    fresh = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(TrainingDiverged) as told: trainer.train(buffer)
    assert told.value.epoch == 1 and 1 <= told.value.step <= 100 and "halve the learning rate (1e+20 to 5e+19)" in str(told.value)
    assert ("lower init_scale (65536 to 32768)" in str(told.value)) == bool(precision)
    assert f"back at the start, which {tmp_path / 'checkpoint.pt'} holds too" in str(told.value)
    assert len(trainer.history.loss) == 100 and trainer.history.abandoned.all() and trainer.epoch == 0
    assert all(torch.equal(value, fresh[name]) for name, value in trainer.model.state_dict().items())
    assert_sound(trainer, lane, tmp_path)


@PRECISIONS
def test_a_hopeless_learning_rate_is_found_in_epochs_of_one_step(buffer, lane, tmp_path, precision):
    "After one step all is finite, and the next forward pass is NaN: the state must not be kept."
    trainer = Trainer(small_config(**precision, learning_rate=1e20, steps_per_epoch=1, num_epochs=400), folder=tmp_path, verbose=False)
    with pytest.raises(TrainingDiverged): trainer.train(buffer)
    assert_sound(trainer, lane, tmp_path)


@PRECISIONS
def test_an_absurd_reward_under_mse(buffer, lane, tmp_path, precision):
    set_reward(buffer, 7, 1e30)
    trainer = Trainer(small_config(**precision, loss="mse"), folder=tmp_path, verbose=False)
    try: trainer.train(buffer)
    except TrainingDiverged as error: assert error.advice[0] == "look at transition 7 of the buffer, whose reward is 1e+30"
    else:
        assert precision and trainer.epoch == 4 and trainer.history.skipped > 0
        assert np.isfinite(trainer.history.epoch_loss).all()
    assert_sound(trainer, lane, tmp_path)


def test_nan_in_a_saved_buffer_is_refused(buffer, tmp_path):
    set_reward(buffer, 7, math.nan)
    steps = next((tmp_path / "buffer").glob("steps-*.npy"))
    saved = np.load(steps)
    saved["reward"][buffer.transition_frames[7]] = math.nan
    np.save(steps, saved)
    with pytest.raises(BufferDataError, match=re.escape(steps.name)): TrainingBuffer.load(tmp_path / "buffer")


@PRECISIONS
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_caught_while_training(buffer, lane, tmp_path, precision, reward):
    set_reward(buffer, 7, reward)
    trainer = Trainer(small_config(**precision), folder=tmp_path, verbose=False)
    try: trainer.train(buffer)
    except TrainingDiverged as error: assert error.advice[0] == f"look at transition 7 of the buffer, whose reward is {reward:g}"
    else: assert precision and trainer.epoch == 4 and trainer.history.skipped > 0
    assert_sound(trainer, lane, tmp_path)


def test_a_lone_bad_batch_is_skipped_and_counted(buffer, lane, tmp_path):
    "Four passes over the buffer, each meets the entry once: FP16 goes on where FP32 has to stop."
    set_reward(buffer, 7, math.nan)
    passes = {"steps_per_epoch": None, "num_epochs": 4}
    trainer = Trainer(small_config(**STUDY, **passes), folder=tmp_path, verbose=False)
    history = trainer.train(buffer)
    assert history.skipped == 4 and [int(history.step_skipped[history.epoch == epoch].sum()) for epoch in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert np.isfinite(history.epoch_loss).all() and int(trainer.updates()) == len(history.loss) - 4
    assert_sound(trainer, lane, tmp_path)
    with pytest.raises(TrainingDiverged, match="transition 7"): Trainer(small_config(**passes), verbose=False).train(buffer)


@PRECISIONS
def test_the_last_good_epoch_is_what_is_left(buffer, lane, tmp_path, precision):
    "It goes wrong in the third epoch; the end of the second one is back, and goes on as if nothing had been."
    config = small_config(**precision, steps_per_epoch=20, init_scale=1024)
    whole = Trainer(config, verbose=False)
    whole.train(buffer)
    trainer = Trainer(config, folder=tmp_path, verbose=False)
    for result in trainer.epochs(buffer):
        if result.epoch == 2: break
    good = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    step, steps = trainer.train_step, []
    def spoiling(batch):
        steps.append(batch)
        if len(steps) == 5: trainer.model.value[2].bias.data.fill_(math.inf)
        return step(batch)
    with mock.patch.object(trainer, "train_step", spoiling), pytest.raises(TrainingDiverged) as told: trainer.train(buffer)
    assert told.value.epoch == 3 and "back at the end of epoch 2" in str(told.value)
    assert trainer.epoch == 2 and all(torch.equal(value, good[name]) for name, value in trainer.model.state_dict().items())
    assert_sound(trainer, lane, tmp_path)
    trainer.train(buffer)
    for name, value in whole.model.state_dict().items(): assert torch.equal(value, trainer.model.state_dict()[name]), name
    kept = ~trainer.history.abandoned
    assert trainer.history.abandoned.sum() == 20
    np.testing.assert_array_equal(trainer.history.loss[kept], whole.history.loss)
    np.testing.assert_array_equal(trainer.history.scale[kept], whole.history.scale)
    assert trainer.history.epoch_loss == whole.history.epoch_loss and len(trainer.history.epoch_seconds) == 4


@pytest.mark.parametrize("part", ["weights", "running statistics", "moments"])
def test_each_part_of_the_state_is_watched(buffer, lane, tmp_path, part):
    "An infinite second moment leaves the weights finite and freezes them; NaN statistics are seen by acting only."
    trainer = Trainer(small_config(), folder=tmp_path, verbose=False)
    step, steps = trainer.train_step, []
    def spoiling(batch):
        steps.append(batch)
        if len(steps) == 150:
            if part == "weights": trainer.model.advantage[2].bias.data[3] = math.nan
            if part == "running statistics": trainer.model.trunk[0][1].running_var.fill_(math.inf)
            if part == "moments": next(iter(trainer.optimizer.state.values()))["exp_avg_sq"].fill_(math.inf)
        return step(batch)
    with mock.patch.object(trainer, "train_step", spoiling), pytest.raises(TrainingDiverged) as told: trainer.train(buffer)
    assert told.value.epoch == 2 and trainer.epoch == 1 and (part in told.value.what or part == "weights")
    assert_sound(trainer, lane, tmp_path)


def test_the_state_is_looked_at_every_hundred_steps(buffer):
    "Not only when the epoch is over."
    trainer, steps = Trainer(small_config(steps_per_epoch=400, num_epochs=1), verbose=False), []
    step = trainer.train_step
    def spoiling(batch):
        steps.append(batch)
        if len(steps) == 120: trainer.model.trunk[0][1].running_mean.fill_(math.nan)
        return step(batch)
    with mock.patch.object(trainer, "train_step", spoiling), pytest.raises(TrainingDiverged): trainer.train(buffer)
    assert len(steps) == 200


@pytest.mark.parametrize("how", ["stop", "interrupt"])
def test_a_stop_in_the_middle_of_the_trouble_leaves_a_sound_state(buffer, lane, tmp_path, how):
    trainer, steps = Trainer(small_config(), folder=tmp_path, verbose=False), []
    step = trainer.train_step
    def spoiling(batch):
        steps.append(batch)
        trainer.model.trunk[0][1].running_mean.fill_(math.nan)
        if len(steps) == 3 and how == "stop": trainer.stop()
        if len(steps) == 3 and how == "interrupt": raise KeyboardInterrupt
        return step(batch)
    with mock.patch.object(trainer, "train_step", spoiling), pytest.raises(TrainingDiverged if how == "stop" else KeyboardInterrupt): trainer.train(buffer)
    assert_sound(trainer, lane, tmp_path)


def test_a_state_that_is_unsound_from_the_start_is_refused_and_not_saved(buffer, tmp_path):
    Trainer(small_config(num_epochs=1), folder=tmp_path, verbose=False).train(buffer)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    broken = LightweightDQN.from_config(small_config())
    broken.trunk[0][1].running_var.fill_(math.nan)
    trainer = Trainer(small_config(), broken, folder=tmp_path, verbose=False)
    with pytest.raises(TrainingDiverged, match="at step 0: BatchNorm's running statistics"): trainer.train(buffer)
    with pytest.raises(ModelFileError, match="checkpoint.pt was not written"): trainer.save_checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(ModelFileError, match="trunk.0.1.running_var"): trainer.save_model(tmp_path / "model.pt")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and not (tmp_path / "model.pt").exists()


def test_an_overflow_in_the_forward_pass_leaves_the_statistics_alone(buffer, lane, tmp_path):
    "The scaler skips the step, but knows nothing of BatchNorm: training would look fine, and acting return NaN."
    trainer = Trainer(small_config(**STUDY, num_epochs=1, steps_per_epoch=5), folder=tmp_path, verbose=False)
    step, steps, weight = trainer.train_step, [], trainer.model.trunk[0][0].weight.data
    def loud(batch):
        steps.append(batch)
        if len(steps) == 3: weight.mul_(1e7)
        before = {name: value.clone() for name, value in trainer.model.named_buffers()}
        loss, was_made = step(batch)
        if len(steps) == 3:
            weight.div_(1e7)
            assert not was_made and not loss.isfinite() and all(torch.equal(value, before[name]) for name, value in trainer.model.named_buffers())
        else: assert was_made and not torch.equal(trainer.model.trunk[0][1].running_mean, before["trunk.0.1.running_mean"])
        return loss, was_made
    with mock.patch.object(trainer, "train_step", loud): trainer.train(buffer)
    assert trainer.history.step_skipped.tolist() == [False, False, True, False, False]
    assert_sound(trainer, lane, tmp_path)


@PRECISIONS
def test_an_optimizer_of_another_model_is_told(buffer, precision):
    trainer = Trainer(small_config(**precision), verbose=False)
    trainer.model = LightweightDQN.from_config(trainer.config)
    with pytest.raises(ValueError, match="no gradient to any parameter of the optimizer"): trainer.train(buffer)


def test_the_error_survives_a_process_boundary():
    error = TrainingDiverged("the loss is not finite", 3, 17, (2.0, 1.0), ("halve it",))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.scales == error.scales


# Going on without AMP

def gold(recorded):
    "Rewards that FP16 can't hold and FP32 can."
    buffer = TrainingBuffer(None, recorded.frame_shape, recorded.num_actions)
    for first, number in recorded.battles:
        start, steps = recorded.transition_frames[first], slice(first, first + number)
        buffer.add_episode(recorded.frames[start:start + number + 1], recorded.actions[steps], 1e6 * (1 + recorded.rewards[steps]), bool(recorded.terminated[steps][-1]))
    return buffer


def fallback_config(**changes): return small_config(**{**STUDY, **dict(loss="mse", on_divergence="fp32", num_epochs=3, steps_per_epoch=30), **changes})


def test_a_run_goes_on_without_amp_and_says_so(recorded, lane, tmp_path, capsys):
    trainer = Trainer(fallback_config(), folder=tmp_path)
    history = trainer.train(gold(recorded))
    told = capsys.readouterr().out
    assert "[Train] Diverged in epoch 1 at step 17: the scale fell below 1; back at the start\n" in told
    assert "  Using AMP: False (AMP diverged in epoch 1)\n" in told
    assert trainer.epoch == 3 and not trainer.use_amp and history.precision == "False (AMP diverged in epoch 1)"
    assert history.events[0]["first_step"] == 1 and history.events[0]["last_step"] == 30 and len(history.loss) == 120
    assert_sound(trainer, lane, tmp_path)
    again = History.load(save(history, tmp_path / "history"))
    assert again.events == history.events and again.abandoned.sum() == 30


def save(history, folder):
    history.save(folder)
    return folder


def test_it_equals_a_run_without_amp_from_the_good_state_on(recorded):
    fallback = Trainer(fallback_config(), verbose=False)
    fp32 = Trainer(fallback_config(use_amp=False), verbose=False)
    buffer = gold(recorded)
    fallback.train(buffer), fp32.train(buffer)
    assert all(torch.equal(value, fp32.model.state_dict()[name]) for name, value in fallback.model.state_dict().items())
    np.testing.assert_array_equal(fallback.history.loss[~fallback.history.abandoned], fp32.history.loss)


def test_a_resumed_fallback_stays_without_amp(recorded, tmp_path, capsys):
    buffer = gold(recorded)
    whole = Trainer(fallback_config(), verbose=False)
    whole.train(buffer)
    first = Trainer(fallback_config(), folder=tmp_path, verbose=False)
    for result in first.epochs(buffer):
        if result.epoch == 2: break
    resumed = Trainer(fallback_config())
    resumed.load_checkpoint(tmp_path / "checkpoint.pt")
    assert "  Using AMP: False (AMP diverged in epoch 1)\n" in capsys.readouterr().out
    resumed.train(buffer)
    assert all(torch.equal(value, whole.model.state_dict()[name]) for name, value in resumed.model.state_dict().items())
    strict = Trainer(fallback_config(on_divergence="stop"), verbose=False)
    strict.load_checkpoint(tmp_path / "checkpoint.pt")
    assert strict.use_amp and strict.scaler.get_scale() == 65536


@pytest.mark.parametrize("change", [{"learning_rate": 1e-4}, {"amp_dtype": "bfloat16"}, {"loss": "huber"}])
def test_a_fallback_tries_amp_again_when_its_settings_were_changed(recorded, tmp_path, change):
    config = fallback_config(num_epochs=1)
    Trainer(config, folder=tmp_path, verbose=False).train(gold(recorded))
    for changes, expected in (({}, False), (change, True)):
        trainer = Trainer(config.replace(num_epochs=2, **changes), verbose=False)
        trainer.load_checkpoint(tmp_path / "checkpoint.pt")
        assert trainer.use_amp is expected


def test_a_resumed_run_knows_what_went_wrong_before(buffer, tmp_path):
    config = small_config(num_epochs=2, steps_per_epoch=5)
    with pytest.raises(TrainingDiverged): Trainer(config.replace(learning_rate=1e20), folder=tmp_path, verbose=False).train(buffer)
    trainer = Trainer(config, verbose=False)
    trainer.load_checkpoint(tmp_path / "checkpoint.pt")
    history = trainer.train(buffer)
    thrown = int(history.abandoned.sum())
    assert len(history.events) == 1 and 0 < thrown == history.events[0]["last_step"] and len(history.loss) == thrown + 10
    straight = Trainer(config, verbose=False).train(buffer)
    np.testing.assert_array_equal(history.loss[thrown:], straight.loss)


def test_a_changed_init_scale_is_where_a_resumed_scaler_starts(buffer, tmp_path):
    config = small_config(**STUDY, num_epochs=2, steps_per_epoch=3)
    Trainer(config.replace(num_epochs=1), folder=tmp_path, verbose=False).train(buffer)
    for changes, expected in (({}, 65536), ({"init_scale": 1024}, 1024)):
        trainer = Trainer(config.replace(**changes), verbose=False)
        trainer.load_checkpoint(tmp_path / "checkpoint.pt")
        assert trainer.scaler.get_scale() == expected


def test_the_best_model_of_an_evaluation_made_up_for_survives_a_divergence(recorded, buffer):
    config = small_config(num_epochs=2, steps_per_epoch=5)
    trainer = Trainer(config, verbose=False)
    def interrupted(model): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): trainer.train(recorded, interrupted)
    set_reward(buffer, slice(None), math.nan)
    with pytest.raises(TrainingDiverged): trainer.train(buffer, lambda model: 1.0)
    assert trainer.history.scores == {1: 1.0} and trainer.best_score == 1.0 and trainer.best_model is not None


def test_fp32_that_diverges_too_ends_in_the_error(buffer, lane, tmp_path):
    trainer = Trainer(small_config(**STUDY, on_divergence="fp32", learning_rate=1e20), folder=tmp_path, verbose=False)
    with pytest.raises(TrainingDiverged) as told: trainer.train(buffer)
    assert len(trainer.history.events) == 2 and "init_scale" not in str(told.value) and trainer.history.abandoned.all()
    assert_sound(trainer, lane, tmp_path)


def test_a_checkpoint_from_before_there_were_events_loads(buffer, tmp_path):
    config = small_config(num_epochs=2, steps_per_epoch=5)
    Trainer(config.replace(num_epochs=1), folder=tmp_path, verbose=False).train(buffer)
    saved = read_checkpoint(tmp_path / "checkpoint.pt")
    saved["version"] = 1
    for place, name in ((saved, "amp_refused"), (saved["history"], "machine"), (saved["history"], "events"), (saved["config"], "on_divergence")): del place[name]
    torch.save(saved, tmp_path / "old.pt")
    trainer = Trainer(config, verbose=False)
    trainer.load_checkpoint(tmp_path / "old.pt")
    assert len(trainer.train(buffer).loss) == 10


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, 0.5])
def test_a_scale_of_no_use_is_not_taken_over(buffer, tmp_path, capsys, scale):
    config = small_config(**STUDY, num_epochs=1, steps_per_epoch=2)
    Trainer(config, folder=tmp_path, verbose=False).train(buffer)
    saved = read_checkpoint(tmp_path / "checkpoint.pt")
    saved["scaler"]["scale"] = scale
    torch.save(saved, tmp_path / "old.pt")
    trainer = Trainer(config)
    trainer.load_checkpoint(tmp_path / "old.pt")
    assert trainer.scaler.get_scale() == 65536 and f"  The checkpoint has a scale of {scale:g}, which is of no use" in capsys.readouterr().out


# Cards

def test_a_card_that_fails_in_sixteen_bits_trains_in_fp32(buffer, lane):
    "The card's part is played by weights that overflow FP16, on the CPU; the check is the one that runs on a card."
    trainer = Trainer(small_config(**STUDY, num_epochs=1, steps_per_epoch=3), verbose=False)
    with torch.no_grad(): trainer.model.trunk[0][0].weight.mul_(1e7)
    states = next(trainer.dataset(buffer).batches(4, 0, 0)).states
    with pytest.warns(UserWarning, match="this cpu computes NaN or infinity in float16 where FP32 does not: training goes on in FP32"): trainer._try_out(states)
    assert str(trainer.precision) == "False (this cpu computes NaN in float16)"
    assert np.isnan(trainer.train(buffer).scale).all() and not trainer.use_amp
    assert_sound(trainer, lane)


def test_a_missing_kernel_is_one_sentence():
    with pytest.raises(DeviceSetupError) as told, _kernel_errors(torch.device("cuda:0")):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with TORCH_USE_CUDA_DSA")
    assert "https://pytorch.org/get-started/locally/" in str(told.value) and "\n" not in str(told.value) and torch.__version__ in str(told.value)
    with pytest.raises(RuntimeError, match="something else"), _kernel_errors(torch.device("cuda:0")): raise RuntimeError("something else")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch is built with CUDA")
def test_pytorch_without_cuda_beside_an_nvidia_driver(tmp_path, monkeypatch, capsys):
    assert "NVIDIA driver" not in str(pytest.raises(ConfigError, resolve_device, "cuda").value)
    tool = tmp_path / ("nvidia-smi.bat" if os.name == "nt" else "nvidia-smi")
    tool.write_text("#!/bin/sh\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    Trainer(small_config(device="auto"))
    sentence = "An NVIDIA driver is installed, but this PyTorch"
    assert f"\n  {sentence}" in capsys.readouterr().out
    assert sentence in str(pytest.raises(ConfigError, resolve_device, "cuda").value)
    Trainer(small_config(device="cpu"))
    assert sentence not in capsys.readouterr().out


# Waits

@contextlib.contextmanager
def waits():
    "Counts what makes the CPU wait for a card: every way of turning a tensor into a plain number, and asking the scaler."
    seen = []
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.Tensor, ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "cpu", "__array__")), (torch.amp.GradScaler, ("get_scale", "state_dict"))):
            for name in names:
                real = getattr(owner, name)
                def spy(*args, _real=real, _name=name, **kwargs):
                    seen.append(_name)
                    return _real(*args, **kwargs)
                stack.enter_context(mock.patch.object(owner, name, spy))
        yield seen


def test_the_spy_sees():
    one = torch.ones(())
    with waits() as seen:
        bool(one), float(one), int(one), one.item(), one.tolist(), one.cpu().numpy(), np.asarray(one)
        torch.amp.GradScaler("cpu").get_scale()
    assert {"__bool__", "__float__", "__int__", "item", "tolist", "cpu", "numpy", "__array__", "get_scale"} <= set(seen)


@PRECISIONS
@pytest.mark.parametrize("extras", [{}, {"double_dqn": True, "cql_alpha": 0.5}, {"use_target_network": False, "grad_clip": None}], ids=["plain", "double", "no target"])
def test_an_epoch_waits_only_for_the_check(buffer, precision, extras):
    trainer = Trainer(small_config(**precision, **extras, steps_per_epoch=250, num_epochs=1), verbose=False)
    during, steps, step = [], [], trainer.train_step
    with waits() as seen:
        def counting(batch):
            if not steps: seen.clear()  # the epoch begins
            steps.append(batch)
            result = step(batch)
            during[:] = seen
            return result
        with mock.patch.object(trainer, "train_step", counting): trainer.train(buffer)
    assert len(steps) == 250 and during == ["tolist", "cpu", "numpy"] * 2  # after steps 100 and 200: sound or not, and what the steps left


# Kills

def train(arguments):
    "The command, in a process of its own that shares no lock with others: a killed one can't give it back."
    tqdm.set_lock(threading.RLock())
    autowzry_train(**arguments)


def test_a_killed_run_always_resumes(tmp_path):
    "kill -9 at twenty random moments: each time the run goes on, and at most one epoch is lost."
    processes = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
    if processes.get_start_method() == "forkserver": processes.set_forkserver_preload(["autowzry_agent.cli", "torch._dynamo"])  # imported once, not twenty times
    record(make_env(LANE_ID), scripted_policy(), steps=200, frame_shape=(3, 32, 32), progress=False).save(tmp_path / "buffer")
    small_config(**STUDY, num_epochs=100_000, evaluate_epochs=100_000, steps_per_epoch=3, batch_size=2).save_yaml(tmp_path / "config.yaml")
    run, draw, done, history = tmp_path / "run", random.Random(0), 0, []
    arguments = {"config": str(tmp_path / "config.yaml"), "buffer": str(tmp_path / "buffer"), "out": str(run), "battles": 1}
    for kill in range(20):
        process = processes.Process(target=train, args=[arguments])
        process.start()
        started = time.monotonic()
        while not (run / "checkpoint.pt").exists() or read_checkpoint(run / "checkpoint.pt")["epoch"] <= done:
            assert process.is_alive() and time.monotonic() - started < 120, f"start {kill} does not train"
            time.sleep(0.02)
        time.sleep(draw.random() * 0.5)
        reached = read_checkpoint(run / "checkpoint.pt")["epoch"]
        process.kill()
        process.join()
        saved = read_checkpoint(run / "checkpoint.pt")
        assert saved["epoch"] >= reached > done, f"kill {kill} lost what was saved"
        done, loss = saved["epoch"], saved["history"]["loss"].tolist()
        assert len(loss) == 3 * done and loss[:len(history)] == history
        history, arguments = loss, {"resume": str(run), "battles": 1}
    whole = Trainer(Config.from_yaml(run / "config.yaml").replace(num_epochs=done), verbose=False)
    assert whole.train(TrainingBuffer.load(tmp_path / "buffer")).loss.tolist() == history  # twenty kills left no trace

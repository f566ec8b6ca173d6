"""The buffer against a naive model of it, on damaged input, under kills, full disks and little memory."""

import errno
import json
import os
import random
import subprocess
import sys
import textwrap
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from PIL import Image

from autowzry_agent import buffer as module
from autowzry_agent.buffer import Batch, BufferDataError, BufferDataset, TrainingBuffer

SHAPE = (1, 8, 16)


def frame(value, shape=SHAPE):
    """A frame that differs for every value."""
    made = np.full(shape, value % 251, np.uint8)
    made.flat[:2] = divmod(value, 256)
    return made


def filled(battles=(5, 3), capacity=None, shape=SHAPE, source="", value=0):
    """A buffer of battles with these numbers of steps, terminated and truncated in turn."""
    buffer = TrainingBuffer(capacity, shape, source=source)
    for k, steps in enumerate(battles):
        frames = np.stack([frame(value + 20 * k + i, shape) for i in range(steps + 1)])
        buffer.add_episode(
            frames, [i % 9 for i in range(steps)], [value + k + i / 8 for i in range(steps)], terminated=k % 2 == 0
        )
    return buffer


def same(a, b):
    """Whether two buffers hold the same."""
    names = ("frames", "actions", "rewards", "terminated", "truncated", "transition_frames")
    labels = ("capacity", "frame_shape", "num_actions", "source", "battles")
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names) and all(
        getattr(a, n) == getattr(b, n) for n in labels
    )


def python(script, *args, **kwargs):
    """Run a script in a Python of its own; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        **kwargs,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# The model: a list of battles, each a list of frames and a list of steps.


class BufferMachine(RuleBasedStateMachine):
    """Any sequence of recording, viewing, saving and loading agrees with a list of battles."""

    folder = None  # set by the test

    @initialize(capacity=st.one_of(st.none(), st.integers(1, 12)))
    def make(self, capacity):
        self.buffer = TrainingBuffer(capacity, SHAPE, source="model")
        self.battles, self.open, self.count, self.views, self.datasets = [], None, 0, [], []

    def new_frame(self):
        self.count += 1
        return frame(self.count)

    @property
    def held(self):
        return self.battles + ([self.open] if self.open else [])

    def end(self):
        """The battle in progress ends as truncated."""
        if self.open and self.open["steps"]:
            self.open["steps"][-1][3] = True
            self.battles.append(self.open)
        self.open = None

    def evict(self, extra):
        capacity = self.buffer.capacity
        while capacity is not None and sum(len(b["steps"]) for b in self.held) + extra > capacity:
            self.battles.pop(0)

    @rule(as_torch=st.booleans())
    def start(self, as_torch):
        first = self.new_frame()
        self.buffer.start(torch.from_numpy(first) if as_torch else first)
        self.end()
        self.open = dict(frames=[first], steps=[])

    @rule(
        action=st.integers(0, 8), reward=st.floats(-2, 2, width=32), terminated=st.booleans(), truncated=st.booleans()
    )
    def add(self, action, reward, terminated, truncated):
        after = self.new_frame()
        if self.open is None:
            with pytest.raises(BufferDataError, match="call start"):
                self.buffer.add(action, reward, after)
        elif len(self.open["steps"]) == self.buffer.capacity:
            with pytest.raises(BufferDataError, match="longer than the capacity"):
                self.buffer.add(action, reward, after)
        else:
            self.buffer.add(np.int64(action), np.float32(reward), after, terminated, np.bool_(truncated))
            self.evict(1)
            self.open["frames"].append(after)
            self.open["steps"].append([action, reward, terminated, truncated])
            if terminated or truncated:
                self.battles.append(self.open)
                self.open = None

    @rule(number=st.integers(1, 14), terminated=st.booleans(), as_list=st.booleans())
    def add_episode(self, number, terminated, as_list):
        frames = [self.new_frame() for _ in range(number + 1)]
        steps = [[(self.count + i) % 9, i / 4, False, False] for i in range(number)]
        given = frames if as_list else torch.from_numpy(np.stack(frames))
        columns = [s[0] for s in steps], np.array([s[1] for s in steps])
        if self.buffer.capacity is not None and number > self.buffer.capacity:
            with pytest.raises(BufferDataError, match="more than the capacity"):
                self.buffer.add_episode(given, *columns, terminated)
            return
        self.buffer.add_episode(given, *columns, terminated)
        steps[-1][2:] = terminated, not terminated
        self.end()
        self.evict(number)
        self.battles.append(dict(frames=frames, steps=steps))

    @rule(bad=st.sampled_from(["action", "reward", "frame"]))
    def refused(self, bad):
        """A refused battle changes nothing (the invariant looks)."""
        frames, actions, rewards = [self.new_frame() for _ in range(3)], [0, 1], [0.0, 0.5]
        if bad == "action":
            actions[1] = 9
        if bad == "reward":
            rewards[1] = np.nan
        if bad == "frame":
            frames[2] = frames[2][0]
        with pytest.raises(BufferDataError):
            self.buffer.add_episode(frames, actions, rewards, True)

    @rule()
    def view(self):
        self.views.append((self.buffer.frames, self.buffer.frames.copy()))

    @rule()
    def forget_views(self):
        self.views.clear()

    @precondition(lambda self: len(self.buffer))
    @rule()
    def dataset(self):
        dataset = BufferDataset(self.buffer)
        self.datasets.append((dataset, [x.clone() for x in dataset.__getitems__(range(len(dataset)))]))

    @rule(keep=st.booleans())
    def save_and_load(self, keep):
        self.buffer.save(self.folder)
        ended = TrainingBuffer.load(self.folder)
        mapped = TrainingBuffer.load(self.folder, mmap=True)
        assert same(ended, mapped)
        if keep:  # the battle in progress goes on after a save; what is on disk has ended
            before, self.open = self.open, None
            if before and before["steps"]:
                self.battles.append(
                    dict(frames=before["frames"], steps=[*before["steps"][:-1], [*before["steps"][-1][:3], True]])
                )
            self.compare(ended)
            if before and before["steps"]:
                self.battles.pop()
            self.open = before
        else:
            self.end()
            self.buffer = ended

    def compare(self, buffer):
        steps = [step for b in self.held for step in b["steps"]]
        frames = [f for b in self.held for f in b["frames"]]
        assert len(buffer) == len(steps) and len(buffer.frames) == len(frames)
        assert all(np.array_equal(a, b) for a, b in zip(buffer.frames, frames))
        for column, name in enumerate(("actions", "rewards", "terminated", "truncated")):
            assert getattr(buffer, name).tolist() == [step[column] for step in steps]
        numbers = [len(b["steps"]) for b in self.held if b["steps"]]
        assert buffer.battles == [(sum(numbers[:i]), n) for i, n in enumerate(numbers)]
        following = [f for b in self.held for f in b["frames"][1:]]
        assert all(
            np.array_equal(buffer.frames[s + 1], f) for s, f in zip(buffer.transition_frames, following, strict=True)
        )

    @invariant()
    def agrees(self):
        self.compare(self.buffer)
        assert self.buffer.nbytes <= 1.1 * self.buffer.frames.nbytes + 64 * len(self.buffer) + 8
        for seen, copy in self.views:
            assert np.array_equal(seen, copy)
        for dataset, expected in self.datasets:
            assert all(map(torch.equal, dataset.__getitems__(range(len(dataset))), expected))


def test_agrees_with_a_list_of_battles(tmp_path):
    """Random sequences of calls, compared after every one."""
    BufferMachine.folder = tmp_path / "缓冲 区"
    run_state_machine_as_test(
        BufferMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


# Recording


def test_start_and_capacity():
    buffer = TrainingBuffer(10, SHAPE)
    for battle in range(3):
        buffer.add_episode([frame(battle)] * 6, [battle] * 5, [0] * 5, True)
    assert buffer.battles == [(0, 5), (5, 5)] and set(buffer.actions) == {1, 2}
    buffer.start(frame(0))
    assert len(buffer) == 10 and len(buffer.frames) == 13
    buffer.start(frame(0))  # one without steps leaves nothing
    assert len(buffer.frames) == 13
    buffer.add(3, 0.5, frame(1))
    assert buffer.battles == [(0, 5), (5, 1)]
    buffer.add_episode([frame(2)] * 2, [4], [1.0], terminated=False)
    assert buffer.truncated.tolist() == [False] * 5 + [True, True]


@pytest.mark.parametrize(
    "action", [9, -1, True, False, 1.0, "1", None, np.float32(1), np.bool_(True), torch.tensor(1.0), np.array([1])]
)
def test_bad_actions(action):
    buffer = filled([2])
    buffer.start(frame(0))
    with pytest.raises(BufferDataError, match="step 1 of the battle: action is .* from 0 to 8"):
        buffer.add(action, 0.0, frame(1))
    with pytest.raises(BufferDataError, match="row 1: action"):
        buffer.add_episode([frame(0)] * 3, [0, action], [0.0, 0.0], True)
    assert len(buffer) == 2


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), -float("inf"), 1e39, 10**400, True, "1", None, 1j, np.float32("nan")]
)
def test_bad_rewards(reward):
    buffer = filled([2])
    buffer.start(frame(0))
    with pytest.raises(BufferDataError, match="reward is .* finite"):
        buffer.add(0, reward, frame(1))
    with pytest.raises(BufferDataError, match="row 1: reward"):
        buffer.add_episode([frame(0)] * 3, [0, 1], [0.0, reward], True)
    assert len(buffer) == 2


@pytest.mark.parametrize(
    "action, reward", [(np.int16(3), np.float64(1)), (torch.tensor(3), torch.tensor(1.0)), (np.array(3), 1)]
)
def test_numbers_of_other_libraries(action, reward):
    buffer = TrainingBuffer(5, SHAPE)
    buffer.start(frame(0))
    buffer.add(action, reward, frame(1))
    assert buffer.actions.tolist() == [3] and buffer.rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (np.zeros((3, 8, 6), np.float32), "float32 (3, 8, 6), expected uint8 (3, 8, 6); values from 0 to 1"),
        (
            np.zeros((8, 6, 3), np.uint8),
            "uint8 (8, 6, 3), expected uint8 (3, 8, 6); its channels stand last, transpose(2, 0, 1)",
        ),
        (torch.zeros(8, 6, 3), "float32 (8, 6, 3), expected uint8 (3, 8, 6); its channels stand last"),
        (np.zeros((3, 6, 8), np.uint8), "uint8 (3, 6, 8), expected uint8 (3, 8, 6)"),
        (torch.zeros(3, 8, 6, dtype=torch.bfloat16), "bfloat16 (3, 8, 6)"),
        (Image.new("RGB", (6, 8)), "Image, expected uint8 (3, 8, 6)"),
        ([[0]], "list, expected"),
        (None, "NoneType, expected"),
    ],
)
def test_bad_frames(wrong, said):
    buffer, good = TrainingBuffer(None, (3, 8, 6)), np.zeros((3, 8, 6), np.uint8)
    buffer.start(good)
    for call in (
        lambda: buffer.start(wrong),
        lambda: buffer.add(0, 0.0, wrong),
        lambda: buffer.add_episode([good, wrong], [0], [0.0], True),
    ):
        with pytest.raises(BufferDataError) as error:
            call()
        assert said in str(error.value)
    assert "frame 1 is" in str(error.value)
    assert len(buffer.frames) == 1  # the battle begun is still in progress
    buffer.add(0, 0.0, good)


def test_bad_episodes():
    buffer = filled([2])
    for frames, actions, rewards in (([frame(0)] * 3, [0], [0.0]), ([frame(0)] * 2, [0], []), ([frame(0)], [], [])):
        with pytest.raises(BufferDataError, match="frames: a battle has|one action at least"):
            buffer.add_episode(frames, actions, rewards, True)
    with pytest.raises(BufferDataError, match=r"transpose\(0, 3, 1, 2\)"):
        buffer.add_episode(np.zeros((2, 8, 16, 1), np.uint8), [0], [0.0], True)
    for flag in (1, None, "true"):
        with pytest.raises(BufferDataError, match="terminated is .* True and False"):
            buffer.add_episode([frame(0)] * 2, [0], [0.0], flag)
    assert len(buffer) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        (0, SHAPE),
        (-1, SHAPE),
        (2.5, SHAPE),
        (True, SHAPE),
        (5, (8, 16)),
        (5, (0, 8, 16)),
        (5, (1.0, 8, 16)),
        (5, "abc"),
        (5, 84),
        (5, SHAPE, 0),
        (5, SHAPE, 40_000),
        (5, SHAPE, 9, None),
    ],
)
def test_bad_settings(arguments):
    with pytest.raises(BufferDataError, match="capacity|frame_shape|num_actions|source"):
        TrainingBuffer(*arguments)


def test_check_names_both():
    buffer = filled([2], source="ALE/Pong-v5")
    buffer.check(SimpleNamespace(input_shape=list(SHAPE), num_actions=9))
    with pytest.raises(
        BufferDataError, match=r"ALE/Pong-v5.*\(1, 8, 16\) and 9 actions.*\(3, 84, 84\) and num_actions 9"
    ):
        buffer.check(SimpleNamespace(input_shape=(3, 84, 84), num_actions=9))
    with pytest.raises(BufferDataError, match="9 actions.*num_actions 6"):
        buffer.check(SimpleNamespace(input_shape=SHAPE, num_actions=6))


def test_repr():
    assert repr(filled([5, 3], capacity=1000, source="toy")) == (
        "TrainingBuffer: 8 of 1,000 transitions in 2 battles, frames (1, 8, 16), 9 actions, 0.0 MB, from toy"
    )


# Memory


@pytest.mark.parametrize("capacity", [None, 400])
@pytest.mark.parametrize("steps", [1, 30, 400])
def test_memory_stays_within_a_tenth(capacity, steps):
    """At every moment, the peaks while making room included."""
    shape, rng = (3, 32, 32), np.random.default_rng(0)
    first = np.zeros(shape, np.uint8)
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        buffer = TrainingBuffer(capacity, shape)
        for _ in range(1500 // steps):
            buffer.start(first)
            for _ in range(rng.integers(1, steps + 1)):
                held = len(buffer.frames)
                tracemalloc.reset_peak()
                buffer.add(0, 0.0, first)
                bound = 1.1 * max(held, len(buffer.frames)) * first.nbytes + 64 * len(buffer)
                assert buffer.nbytes <= 1.1 * len(buffer.frames) * first.nbytes + 64 * len(buffer)
                assert tracemalloc.get_traced_memory()[1] - base <= bound + 30_000  # what Python itself needs
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="how a system grows an array in place is its own affair"
)
def test_memory_of_the_process():
    """The largest the process ever was, recording 125 MB."""
    script = """
        import resource, numpy as np
        from autowzry_agent.buffer import TrainingBuffer
        # ru_maxrss would begin with the size of the process that started this one.
        peak = lambda: 1024 * int(next(line for line in open('/proc/self/status', encoding='utf-8') if line.startswith('VmHWM')).split()[1])
        frame, buffer = np.ones((3, 84, 84), np.uint8), TrainingBuffer(None, (3, 84, 84))
        buffer.start(frame)
        now = int(open('/proc/self/statm', encoding='utf-8').read().split()[1]) * resource.getpagesize()
        for i in range(6000): buffer.add(0, 0.0, frame)
        print(peak() - now, buffer.frames.nbytes)
    """
    grown, frames = map(int, python(script).split())
    assert grown <= 1.1 * frames + 64 * 6000 + 4e6


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux can limit a process to so much memory of its own"
)
def test_a_buffer_larger_than_memory_is_read_mapped(tmp_path):
    buffer = TrainingBuffer(None, (3, 128, 128))
    one = np.zeros((3, 128, 128), np.uint8)
    buffer.add_episode([one] * 2001, [0] * 2000, [0.5] * 2000, True)
    buffer.save(tmp_path / "big")
    script = """
        import re, resource, sys, torch
        from autowzry_agent.buffer import *
        torch.set_num_threads(1)
        used = int(re.search(r'VmData:\\s+(\\d+)', open('/proc/self/status', encoding='utf-8').read())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + 50_000_000, -1))
        try: TrainingBuffer.load(sys.argv[1])
        except BufferDataError as error: print(error)
        buffer = TrainingBuffer.load(sys.argv[1], mmap=True)
        print(sum(float(batch.rewards.sum()) for batch in BufferDataset(buffer).batches(32, seed=0, epoch=0)), buffer.nbytes)
    """
    refused, read = python(script, tmp_path / "big").splitlines()
    assert "98.4 MB" in refused and "mmap=True" in refused
    assert read.split() == ["1000.0", str(2001 * 8)]


def test_memory_is_asked_for_first(tmp_path, monkeypatch):
    """A machine with 1 MB left refuses 20 MB, naming both, and what is held stays."""
    buffer, big = TrainingBuffer(None, (3, 256, 256)), np.zeros((3, 256, 256), np.uint8)
    buffer.add_episode([big] * 100, [0] * 99, [0.0] * 99, True)
    buffer.save(tmp_path / "b")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    with pytest.raises(BufferDataError, match=r"needs 20.6 MB.* 1.0 MB are free; what is held stays"):
        buffer.add_episode([big] * 100, [0] * 99, [0.0] * 99, True)
    assert len(buffer) == 99
    with pytest.raises(BufferDataError, match=r"19.7 MB.* 1.0 MB are free; .*mmap=True"):
        TrainingBuffer.load(tmp_path / "b")
    assert same(TrainingBuffer.load(tmp_path / "b", mmap=True), buffer)


def test_memory_refused_drops_no_battle(monkeypatch):
    """The oldest battles are given up only when there is room for the new one."""
    buffer, big = TrainingBuffer(100, (3, 384, 384)), np.zeros((3, 384, 384), np.uint8)
    buffer.add_episode([big] * 20, [0] * 19, [0.0] * 19, True)
    buffer.start(big)
    buffer.add(1, 0.5, big)
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
        with pytest.raises(BufferDataError, match="what is held stays"):
            buffer.add_episode([big] * 96, [0] * 95, [0.0] * 95, True)
    assert (len(buffer), buffer.battles, buffer.truncated.any()) == (20, [(0, 19), (19, 1)], False)
    buffer.add(2, 0.25, big, True)
    assert buffer.actions[-2:].tolist() == [1, 2]
    buffer.add_episode([big] * 96, [0] * 95, [0.0] * 95, True)
    assert buffer.battles == [(0, 2), (2, 95)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")
@pytest.mark.parametrize("way", ["resident", "pinned", "mapped"])
def test_batches_on_a_gpu_equal_those_on_the_cpu(tmp_path, monkeypatch, way):
    buffer = filled([5, 7, 3])
    expected = list(BufferDataset(buffer, "cpu").batches(4, 0, 1))
    if way == "mapped":
        buffer.save(tmp_path / "b")
        buffer = TrainingBuffer.load(tmp_path / "b", mmap=True)
    if way != "resident":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))
    for batch, wanted in zip(BufferDataset(buffer, "cuda").batches(4, 0, 1), expected, strict=True):
        for got, want in zip(batch, wanted):
            assert got.is_cuda and torch.equal(got.cpu(), want)


def test_memory_refused_by_the_system(monkeypatch):
    buffer = filled([3])
    before = filled([3])

    def refuse(self, slots):
        raise MemoryError

    monkeypatch.setattr(TrainingBuffer, "_resize", refuse)
    with pytest.raises(BufferDataError, match="refused by the system; what is held stays"):
        buffer.start(frame(0))
    assert same(buffer, before)


# On disk


@pytest.mark.parametrize("name", ["plain", "with space", "战斗 记录/第一场"])
@pytest.mark.parametrize("mmap", [False, True])
def test_save_and_load(tmp_path, name, mmap):
    buffer = filled(capacity=100, source="录像 ünïcode \udcff")
    buffer.save(tmp_path / name)
    buffer.save(str(tmp_path / name))
    assert same(TrainingBuffer.load(tmp_path / name, mmap=mmap), buffer)
    assert len(list((tmp_path / name).iterdir())) == 3


def test_loaded_buffer_records_on(tmp_path):
    buffer = filled([5, 3], capacity=9)
    buffer.save(tmp_path)
    loaded = TrainingBuffer.load(tmp_path)
    loaded.add_episode([frame(90)] * 3, [1, 1], [0, 0], True)
    assert loaded.battles == [(0, 3), (3, 2)]
    loaded.save(tmp_path)
    assert same(TrainingBuffer.load(tmp_path), loaded)


@pytest.mark.parametrize("mmap", [False, True])
def test_empty_buffer(tmp_path, mmap):
    buffer = TrainingBuffer(7, SHAPE)
    buffer.start(frame(0))
    buffer.save(tmp_path)
    loaded = TrainingBuffer.load(tmp_path, mmap=mmap)
    assert len(loaded) == len(loaded.frames) == 0 and loaded.capacity == 7 and loaded.battles == []
    with pytest.raises(BufferDataError, match="empty"):
        BufferDataset(loaded)


def test_mapped_buffer_is_saved_over_itself(tmp_path):
    buffer = filled()
    buffer.save(tmp_path)
    mapped = TrainingBuffer.load(tmp_path, mmap=True)
    dataset = BufferDataset(mapped)
    mapped.save(tmp_path)
    filled([1]).save(tmp_path)
    assert same(mapped, buffer)
    assert dataset.__getitems__(range(8)).actions.tolist() == buffer.actions.tolist()
    for call in (
        lambda: mapped.start(frame(0)),
        lambda: mapped.add(0, 0.0, frame(0)),
        lambda: mapped.add_episode([frame(0)] * 2, [0], [0.0], True),
    ):
        with pytest.raises(BufferDataError, match="read-only"):
            call()


def test_saving_leaves_files_of_others_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "frames-mine.npy").write_bytes(b"mine")
    (tmp_path / "frames-0123456789ab.npy").write_bytes(b"left by a killed save")
    filled().save(tmp_path)
    filled().save(tmp_path)
    assert sorted(p.name.split("-")[0] for p in tmp_path.iterdir()) == [
        "buffer.json",
        "frames",
        "frames",
        "notes.txt",
        "steps",
    ]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BufferDataError, match="is a file"):
        filled().save(tmp_path / "file")
    for content in ('{"a": 1}', "[]", "no json", '{"format": "other", "version": 1}'):
        other = tmp_path / f"other {len(content)}"
        other.mkdir()
        (other / "buffer.json").write_text(content, encoding="utf-8")
        with pytest.raises(BufferDataError, match="buffer.json"):
            filled().save(other)
        assert (other / "buffer.json").read_text(encoding="utf-8") == content and len(list(other.iterdir())) == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("first", [True, False])
def test_full_disk(tmp_path, monkeypatch, call, first):
    """Whichever write fails: an error, no new file, and the buffer from before."""
    if not first:
        filled().save(tmp_path / "b")
    real, calls = getattr(os, call), []
    for failing in range(3 if call == "fsync" else 1):
        calls.clear()

        def fail(*args):
            calls.append(args)
            if len(calls) == failing + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(
            BufferDataError, match="could not be saved.*No space left.*one saved there before is unchanged"
        ):
            filled([2], value=50).save(tmp_path / "b")
        monkeypatch.setattr(os, call, real)
        if first:
            assert list((tmp_path / "b").iterdir()) == []
        else:
            assert same(TrainingBuffer.load(tmp_path / "b"), filled())
            assert len(list((tmp_path / "b").iterdir())) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits on the size of files are a POSIX thing")
def test_file_size_limit(tmp_path):
    """A real write that the system cuts short."""
    filled().save(tmp_path)
    script = """
        import resource, signal, sys, numpy as np
        from autowzry_agent.buffer import *
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
        buffer = TrainingBuffer(None, (1, 8, 16))
        buffer.add_episode(np.zeros((2001, 1, 8, 16), np.uint8), [0] * 2000, [0.0] * 2000, True)
        try: buffer.save(sys.argv[1])
        except BufferDataError as error: print(error)
    """
    assert "could not be saved" in python(script, tmp_path)
    assert same(TrainingBuffer.load(tmp_path), filled()) and len(list(tmp_path.iterdir())) == 3


def test_interrupt_during_save(tmp_path, monkeypatch):
    filled().save(tmp_path)
    real = module._write_file

    def interrupt(path, pieces):
        real(path, pieces)
        if path.name.startswith("steps"):
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        filled([1]).save(tmp_path)
    assert same(TrainingBuffer.load(tmp_path), filled()) and len(list(tmp_path.iterdir())) == 3


KILL = """
    import os, random, signal, sys, time, numpy as np
    from autowzry_agent.buffer import TrainingBuffer
    folder = sys.argv[1]
    def make(value, steps):
        buffer = TrainingBuffer(None, (3, 84, 84))
        buffer.add_episode(np.full((steps + 1, 3, 84, 84), value, np.uint8), [value] * steps, [value] * steps, True)
        return buffer
    old, new = make(1, 150), make(2, 120)
    def whole():
        loaded = TrainingBuffer.load(folder)
        value = int(loaded.actions[0])
        expected = {1: old, 2: new}[value]
        assert np.array_equal(loaded.frames, expected.frames) and np.array_equal(loaded.rewards, expected.rewards)
        return value
    old.save(folder)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork; the next test is the one for Windows")
def test_kill_during_save(tmp_path):
    """Killed before every file operation of a save in turn, then at random moments."""
    script = (
        KILL
        + """
    def in_child(work):
        pid = os.fork()
        if pid == 0:
            work()
            os._exit(0)
        return pid
    def save_until(step):
        left = [step]
        def counted(call):
            def run(*args, **kwargs):
                if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return call(*args, **kwargs)
            return run
        for name in ('fsync', 'replace', 'unlink', 'open'): setattr(os, name, counted(getattr(os, name)))
        new.save(folder)
    seen, step, status = [], 0, 1
    while status:
        old.save(folder)
        status = os.waitpid(in_child(lambda: save_until(step)), 0)[1]
        seen.append(whole())
        step += 1
    assert seen == sorted(seen) and seen[0] == 1 and seen[-1] == 2, seen
    def forever():
        while True: new.save(folder); old.save(folder)
    for trial in range(25):
        pid = in_child(forever)
        time.sleep(random.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        whole()
    old.save(folder)
    print(len(seen), len(os.listdir(folder)))
    """
    )
    steps, files = map(int, python(script, tmp_path / "b").split())
    assert steps >= 8 and files == 3


@pytest.mark.skipif(hasattr(os, "fork"), reason="the test before it kills more often")
def test_kill_during_save_without_fork(tmp_path):
    script = (
        KILL
        + """
    print('ready', flush=True)
    while True: new.save(folder); old.save(folder)
    """
    )
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "b")], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        process.communicate()
        assert int(TrainingBuffer.load(tmp_path / "b").actions[0]) in (1, 2)


def change_meta(**changes):
    def change(folder):
        meta = json.loads((folder / "buffer.json").read_text(encoding="utf-8"))
        (folder / "buffer.json").write_text(
            json.dumps({k: v for k, v in {**meta, **changes}.items() if v != "gone"}), encoding="utf-8"
        )

    return change


def change_steps(row, **changes):
    def change(folder):
        path = next(folder.glob("steps-*"))
        steps = np.load(path)
        for name, value in changes.items():
            steps[name][row] = value
        np.save(path, steps)

    return change


def rewrite(pattern, content):
    def change(folder):
        path = next(folder.glob(pattern))
        whole = path.read_bytes()
        path.write_bytes(content(whole) if callable(content) else content)

    return change


def pickled(folder):
    np.save(next(folder.glob("steps-*")), np.array([{}] * 10, dtype=object), allow_pickle=True)


DAMAGE = {
    "no metadata": (lambda folder: (folder / "buffer.json").unlink(), "no saved buffer: it has no buffer.json"),
    "broken JSON": (rewrite("buffer.json", b'{"format"'), "buffer.json cannot be read"),
    "empty metadata": (rewrite("buffer.json", b""), "buffer.json cannot be read"),
    "not UTF-8": (rewrite("buffer.json", b'{"source": "\xff"}'), "buffer.json cannot be read"),
    "a list": (rewrite("buffer.json", b"[1]"), "buffer.json does not describe a buffer"),
    "other format": (change_meta(format="other"), "does not describe a buffer"),
    "future": (change_meta(version=2), "version 2, .* update autowzry-agent"),
    "odd version": (change_meta(version="1"), "buffer.json: version is '1'"),
    "key missing": (change_meta(num_actions="gone"), "buffer.json lacks 'num_actions'"),
    "odd shape": (change_meta(frame_shape=[8, 16]), "buffer.json: frame_shape"),
    "odd capacity": (change_meta(capacity=-1), "buffer.json: capacity is -1"),
    "odd source": (change_meta(source=3), "buffer.json: source"),
    "odd number": (change_meta(frames="10"), "buffer.json: frames"),
    "outside file": (change_meta(frames_file="../frames-0123456789ab.npy"), "buffer.json: wrong file names"),
    "small capacity": (change_meta(capacity=3), "8 transitions, more than its capacity of 3"),
    "other shape": (
        change_meta(frame_shape=[1, 16, 8]),
        r"frames-.*npy holds uint8 \(10, 1, 8, 16\), buffer.json says uint8 \(10, 1, 16, 8\)",
    ),
    "other number": (change_meta(frames=11), "frames-.*npy holds"),
    "fewer actions": (change_meta(num_actions=3), "steps-.*npy row 3: action is 3"),
    "frames missing": (lambda folder: next(folder.glob("frames-*")).unlink(), "frames-.*npy is missing"),
    "steps missing": (lambda folder: next(folder.glob("steps-*")).unlink(), "steps-.*npy is missing"),
    "frames cut": (rewrite("frames-*", lambda whole: whole[:-1]), "frames-.*npy is damaged"),
    "frames empty": (rewrite("frames-*", b""), "frames-.*npy is damaged"),
    "steps cut": (rewrite("steps-*", lambda whole: whole[:-1]), "steps-.*npy is damaged"),
    "header cut": (rewrite("steps-*", lambda whole: whole[:50]), "steps-.*npy is damaged"),
    "not an array": (rewrite("steps-*", b"PK\x03\x04 nothing"), "steps-.*npy is damaged"),
    "pickled": (pickled, "steps-.*npy is damaged"),
    "other dtype": (lambda folder: np.save(next(folder.glob("steps-*")), np.zeros(10)), "steps-.*npy holds float64"),
    "Fortran order": (
        lambda folder: np.save(next(folder.glob("frames-*")), np.zeros((10, *SHAPE), np.uint8, order="F")),
        "frames-.*npy holds",
    ),
    "action": (change_steps(2, action=9), "steps-.*npy row 2: action is 9"),
    "negative action": (change_steps(2, action=-2), "steps-.*npy row 2: action is -2"),
    "NaN": (change_steps(7, reward=np.nan), "steps-.*npy row 7: reward is nan"),
    "infinite": (change_steps(7, reward=-np.inf), "steps-.*npy row 7: reward is -inf"),
    "no end": (change_steps(-1, action=0), "steps-.*npy stops in the middle"),
    "battle without steps": (change_steps(slice(6, 8), action=-1), "steps-.*npy row 6: a battle without"),
    "ends early": (change_steps(1, terminated=True), "steps-.*npy row 1: terminated is True"),
    "does not end": (change_steps(4, terminated=False), "steps-.*npy row 4: terminated is False"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("mmap", [False, True])
def test_damaged_buffers(tmp_path, name, mmap):
    damage, said = DAMAGE[name]
    filled([5, 3]).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(BufferDataError, match=said):
        TrainingBuffer.load(tmp_path, mmap=mmap)


def test_no_folder(tmp_path):
    with pytest.raises(BufferDataError, match="is missing"):
        TrainingBuffer.load(tmp_path / "none")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BufferDataError, match="is a file"):
        TrainingBuffer.load(tmp_path / "file")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    which=st.sampled_from(["buffer.json", "steps-*", "frames-*"]),
    place=st.floats(0, 1),
    byte=st.integers(0, 255),
    cut=st.booleans(),
)
def test_any_damage_is_one_error_or_none(tmp_path_factory, which, place, byte, cut):
    """A byte changed or a file cut anywhere: loads, or says BufferDataError."""
    folder = tmp_path_factory.mktemp("damaged")
    filled([5, 3]).save(folder)
    path = next(folder.glob(which))
    content = bytearray(path.read_bytes())
    at = min(int(place * len(content)), len(content) - 1)
    if cut:
        del content[at:]
    else:
        content[at] = byte
    path.write_bytes(content)
    try:
        TrainingBuffer.load(folder)
    except BufferDataError as error:
        assert str(folder) in str(error)


# Screenshots

ROWS = ("action,reward,terminated", "2,0.01,0", "3,-0.5,0", "1,1.0,1")


def screenshots(folder, rows=ROWS, numbers=range(1, 5), name="截图 {:04}.png", size=(40, 30), encoding="utf-8"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "moves.csv").write_text("\n".join(rows), encoding=encoding)
    for number in numbers:
        Image.new("RGB", size, (number % 256, 100, 200)).save(folder / name.format(number))
    return folder


def read(folder, **kwargs):
    return TrainingBuffer.from_images(folder, **{"frame_shape": (3, 10, 12), "progress": False, **kwargs})


def test_one_battle(tmp_path, capfd):
    buffer = read(screenshots(tmp_path / "第 1 场"), progress=True)
    assert "4/4" in capfd.readouterr().err
    assert buffer.actions.tolist() == [2, 3, 1] and buffer.rewards.tolist() == pytest.approx([0.01, -0.5, 1.0])
    assert buffer.terminated.tolist() == [False, False, True] and not buffer.truncated.any()
    assert buffer.frames.shape == (4, 3, 10, 12) and buffer.frames[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    assert buffer.source == "images: 第 1 场" and buffer.capacity is None


def test_forms_of_the_table(tmp_path):
    rows = ("note;, Reward ,terminated,action", "x,0.5,FALSE,2", '"a, b",1e-2,False,3', "", "y,1,True,0", "")
    buffer = read(screenshots(tmp_path, rows, encoding="utf-8-sig"))
    assert buffer.actions.tolist() == [2, 3, 0] and buffer.rewards.tolist() == pytest.approx([0.5, 0.01, 1])


def test_numbers_and_kinds_of_images(tmp_path):
    screenshots(tmp_path, numbers=range(98, 101), name="run2 frame{}.jpeg")
    Image.new("L", (40, 30), 7).save(tmp_path / "z 101.PNG")
    (tmp_path / "._z 101.png").write_bytes(b"")
    buffer = read(tmp_path, frame_shape=(1, 10, 12))
    assert buffer.frames.shape == (4, 1, 10, 12) and set(buffer.frames[3].flat) == {7}


def test_palette_images(tmp_path):
    screenshots(tmp_path)
    image = Image.new("P", (40, 30), 1)
    image.save(tmp_path / "截图 0002.png", transparency=bytes([255, 128]))
    assert len(read(tmp_path)) == 3


def test_the_image_after_the_end_may_be_missing(tmp_path):
    buffer = read(screenshots(tmp_path / "a", numbers=range(1, 4)))
    assert len(buffer) == 3 and np.array_equal(buffer.frames[3], buffer.frames[2])
    buffer = read(screenshots(tmp_path / "b", ROWS[:3], numbers=range(1, 4)))
    assert buffer.truncated.tolist() == [False, True]


def test_battles_in_subfolders(tmp_path):
    for number in (10, 9, 1):
        screenshots(tmp_path / f"battle {number}", (ROWS[0], f"{number % 9},0,1"), numbers=[5, 6])
    (tmp_path / "notes").mkdir()
    buffer = read(tmp_path)
    assert buffer.battles == [(0, 1), (1, 1), (2, 1)] and buffer.actions.tolist() == [1, 0, 1]
    assert buffer.terminated.all()


def other_size(folder):
    Image.new("RGB", (30, 40)).save(folder / "截图 0003.png")


IMAGES = {
    "no folder": (dict(), lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(), "is not a folder"),
    "no CSV": (dict(), lambda f: (f / "moves.csv").unlink(), "needs one CSV file .* found none"),
    "two CSVs": (dict(), lambda f: (f / "b.csv").write_text("", encoding="utf-8"), "found b.csv, moves.csv"),
    "CSV here and below": (dict(), lambda f: screenshots(f / "sub"), "and so have its subfolders"),
    "missing column": (
        dict(rows=("action,reward", "1,0")),
        None,
        r"moves.csv needs one column terminated, .*\['action', 'reward'\]",
    ),
    "column twice": (dict(rows=("action,action,reward,terminated", "1,1,0,1")), None, "needs one column action"),
    "empty CSV": (dict(rows=()), None, "moves.csv needs one column action"),
    "no rows": (dict(rows=ROWS[:1]), None, "moves.csv has no rows"),
    "short row": (dict(rows=(*ROWS[:2], "3")), None, "moves.csv line 3: "),
    "bad action": (dict(rows=(*ROWS[:2], "x,0,0")), None, "moves.csv line 3: action is 'x'"),
    "float action": (dict(rows=(*ROWS[:2], "1.5,0,0")), None, "moves.csv line 3: action is '1.5'"),
    "large action": (dict(rows=(*ROWS[:2], "9,0,0")), None, "moves.csv line 3: action is 9, .* from 0 to 8"),
    "bad reward": (dict(rows=(*ROWS[:2], "1,lots,0")), None, "moves.csv line 3: reward is 'lots'"),
    "NaN reward": (dict(rows=(*ROWS[:2], "1,nan,0")), None, "moves.csv line 3: reward is nan"),
    "infinite reward": (dict(rows=(*ROWS[:2], "1,1e39,0")), None, "moves.csv line 3: reward is 1e\\+39"),
    "bad flag": (dict(rows=(*ROWS[:2], "1,0,maybe")), None, "moves.csv line 3: terminated is 'maybe'"),
    "ends early": (
        dict(rows=(ROWS[0], "1,0,1", "1,0,0")),
        None,
        "moves.csv line 2: the battle ends here but rows follow",
    ),
    "GBK": (dict(rows=("action,reward,terminated,备注", "1,0,1,好"), encoding="gbk"), None, "moves.csv is not UTF-8"),
    "no images": (dict(numbers=()), None, "has no images"),
    "gap": (dict(numbers=(1, 3, 4)), None, "moves.csv line 3: row 2 has no image, number 2 is missing"),
    "too few": (dict(numbers=(1, 2)), None, "moves.csv line 4: row 3 has no image, number 3 is missing"),
    "no image of the end": (
        dict(rows=ROWS[:3], numbers=(1, 2)),
        None,
        "moves.csv line 3: the last row is not terminated, .* number 3",
    ),
    "too many": (
        dict(numbers=range(1, 7)),
        None,
        "截图 0005.png belongs to no row: moves.csv has 3 rows, and there are 6 images",
    ),
    "same number": (
        dict(),
        lambda f: (f / "截图 0002.png").rename(f / "b1.png"),
        "截图 0001.png has the same number as b1.png: 1",
    ),
    "no number": (dict(), lambda f: (f / "截图 0002.png").rename(f / "last.png"), "last.png has no number"),
    "other size": (dict(), other_size, "截图 0003.png is 30×40 pixels, the first image of its battle is 40×30"),
    "no picture": (dict(), rewrite("*0003.png", b"no picture"), "截图 0003.png cannot be read as an image"),
    "cut picture": (
        dict(size=(400, 300)),
        rewrite("*0003.png", lambda whole: whole[:-60]),
        "截图 0003.png cannot be read as an image",
    ),
    "empty picture": (dict(), rewrite("*0003.png", b""), "截图 0003.png cannot be read as an image"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_bad_screenshots(tmp_path, name):
    kwargs, change, said = IMAGES[name]
    folder = screenshots(tmp_path / "battle", **kwargs)
    if change:
        change(folder)
    with pytest.raises(BufferDataError, match=said) as error:
        read(folder)
    assert str(folder) in str(error.value)


def test_a_subfolder_without_table_is_not_skipped(tmp_path):
    screenshots(tmp_path / "1")
    (screenshots(tmp_path / "2") / "moves.csv").unlink()
    with pytest.raises(BufferDataError, match="2 needs one CSV file .* found none"):
        read(tmp_path)
    with pytest.raises(BufferDataError, match="1 channel .* or 3"):
        read(tmp_path / "1", frame_shape=(4, 10, 12))


# Batches


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    battles=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    batch_size=st.integers(2, 12),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
)
def test_one_pass_covers_every_transition_once(battles, batch_size, seed, epoch):
    buffer = filled(battles)
    dataset, number = BufferDataset(buffer), len(buffer)
    if number < 2:
        with pytest.raises(BufferDataError, match="one transition"):
            next(dataset.batches(batch_size, seed, epoch))
        return
    batches = list(dataset.batches(batch_size, seed, epoch))
    sizes = [len(batch.actions) for batch in batches]
    left = number % batch_size
    assert sizes == [batch_size] * (number // batch_size) + ([left] if left > 1 else [])
    assert len(batches) == dataset.num_batches(batch_size)
    seen = [(int(state.flatten()[0]) * 256 + int(state.flatten()[1])) for batch in batches for state in batch.states]
    every = [int(f.flat[0]) * 256 + int(f.flat[1]) for f in buffer.frames[buffer.transition_frames]]
    assert len(set(seen)) == len(seen) == number - (left == 1) and set(seen) <= set(every)


def test_order_is_its_own():
    """The same for the same seed and epoch, whatever else draws random numbers, and another for others."""
    dataset = BufferDataset(filled([40, 30, 30]))
    order = lambda *key: torch.cat([batch.states.flatten(1)[:, 1] for batch in dataset.batches(8, *key)]).tolist()
    first = order(3, 4)
    np.random.seed(0), torch.manual_seed(0), random.seed(0)
    assert order(3, 4) == first
    assert len({tuple(order(*key)) for key in ((3, 4), (4, 3), (3, 5), (0, 0))}) == 4


def test_steps_take_as_many_passes_as_needed():
    dataset = BufferDataset(filled([5, 4]))
    one = list(dataset.batches(4, seed=1, epoch=2))
    many = list(dataset.batches(4, seed=1, epoch=2, steps=7))
    assert [len(b.actions) for b in many] == [4] * 7 and dataset.num_batches(4, steps=7) == 7
    assert all(torch.equal(a.states, b.states) for a, b in zip(one, many))
    assert not all(torch.equal(a.states, b.states) for a, b in zip(one, many[2:]))
    for wrong in (1, 0, 2.0, True):
        with pytest.raises(BufferDataError, match="batch_size"):
            dataset.num_batches(wrong)
    with pytest.raises(BufferDataError, match="steps"):
        dataset.num_batches(4, steps=0)


@pytest.mark.parametrize("mmap", [False, True])
def test_batch_contents(tmp_path, mmap):
    buffer = filled([5, 3])
    buffer.save(tmp_path)
    dataset = BufferDataset(TrainingBuffer.load(tmp_path, mmap=mmap))
    batch = dataset.__getitems__([7, 0, 4, -8])
    assert isinstance(batch, Batch) and dataset.device == torch.device("cpu")
    assert [values.dtype for values in batch] == [torch.uint8, torch.int64, torch.float32, torch.uint8, torch.bool]
    slots = buffer.transition_frames[[7, 0, 4, 0]]
    assert np.array_equal(batch.states, buffer.frames[slots]) and np.array_equal(
        batch.next_states, buffer.frames[slots + 1]
    )
    assert np.array_equal(batch.actions, buffer.actions[[7, 0, 4, 0]]) and np.array_equal(
        batch.rewards, buffer.rewards[[7, 0, 4, 0]]
    )
    assert batch.terminated.tolist() == [False, False, True, False]  # the truncated one goes on
    assert all(torch.equal(values[0], one) for values, one in zip(batch, dataset[7]))
    batch.states.zero_()
    assert same(TrainingBuffer.load(tmp_path), buffer)
    for wrong in (8, -9, 10**6):
        with pytest.raises(IndexError, match="8 transitions"):
            dataset[wrong]
        with pytest.raises(IndexError):
            dataset.__getitems__([0, wrong])
    for wrong in ([0.5], [True], [[0]]):
        with pytest.raises(TypeError):
            dataset.__getitems__(wrong)
    assert sum(1 for _ in dataset) == 8


def test_data_loader():
    dataset = BufferDataset(filled([5, 3]))
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, collate_fn=lambda batch: batch)
    assert torch.equal(torch.cat([batch.actions for batch in loader]), dataset.__getitems__(range(8)).actions)


def test_mapped_frames_warn_about_nothing(tmp_path, recwarn):
    filled().save(tmp_path)
    list(BufferDataset(TrainingBuffer.load(tmp_path, mmap=True)).batches(4, 0, 0))
    assert not recwarn.list


def test_imports_no_plotting():
    """Recording and training run on a bare server."""
    said = python(
        "import sys, autowzry_agent.buffer; print([m for m in ('matplotlib', 'ipywidgets') if m in sys.modules])"
    )
    assert said.strip() == "[]"

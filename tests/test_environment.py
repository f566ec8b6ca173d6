"""The built-in battle under any moves and seeds, recording against what environments gave, evaluation against players whose results are known."""
import itertools
import statistics
import subprocess
import sys
import textwrap

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import check_env
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autowzry_agent import environment as module
from autowzry_agent.buffer import TrainingBuffer
from autowzry_agent.environment import (
    LANE_ID, MOVE_NAMES, MOVES, EnvironmentSetupError, Evaluation, LaneBattle, evaluate, make_env, model_policy, random_policy, record, scripted_policy,
)
from autowzry_agent.model import LightweightDQN

SEEDS = st.integers(0, 2**32 - 1)
ACTIONS = st.lists(st.integers(0, len(MOVES) - 1), max_size=80)


@pytest.fixture
def lane():
    with make_env(LANE_ID) as env:
        yield env


def mini(shape=(3, 44, 44), num_actions=9):
    torch.manual_seed(0)
    return LightweightDQN(num_actions, "mini", shape)


class Counter(gym.Env):
    """Pictures that show which battle and step they are; every battle has `length` steps and ends in the way it was told."""

    def __init__(self, shape=(40, 50, 3), num_actions=4, length=5, ends="terminated", space=None, actions=None, rewards=1.0):
        self.observation_space = space or Box(0, 255, shape, np.uint8)
        self.action_space = actions or Discrete(num_actions)
        self.length, self.ends, self.rewards = length, ends, rewards
        self.battle, self.given, self.resets = -1, [], []

    def picture(self):
        picture = np.full(self.observation_space.shape, (10 * self.battle + self.count) % 256, np.uint8)
        self.given.append(picture)
        return picture

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append(seed)
        self.battle, self.count = self.battle + 1, 0
        return self.picture(), {}

    def step(self, action):
        self.count += 1
        over = self.count == self.length
        return self.picture(), self.rewards, over and self.ends == "terminated", over and self.ends == "truncated", {}


# The built-in battle


@pytest.mark.parametrize("options", [{}, {"cell": 8}, {"render_mode": "rgb_array"}])
def test_the_battle_passes_gymnasiums_check(options):
    check_env(gym.make(LANE_ID, **options).unwrapped)


def test_the_battle_is_made_by_its_module_and_id():
    code = f"import gymnasium as gym; print(gym.make('autowzry_agent.environment:{LANE_ID}').reset(seed=0)[0].shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.strip() == "(44, 44, 3)", done.stderr


def test_moves_go_where_their_names_say():
    lane = LaneBattle()
    for name, (row, column) in zip(MOVE_NAMES, MOVES):
        lane.reset(seed=0)
        lane.hero = (8, 2)
        lane.step(MOVE_NAMES.index(name))
        assert lane.hero == (8 + row, 2 + column)
        assert name == (("N" if row < 0 else "S" if row else "") + ("W" if column < 0 else "E" if column else "") or "stay")


@given(SEEDS, ACTIONS)
@example(0, [2] * 10)
def test_a_battle_keeps_its_rules_under_any_moves(seed, actions):
    lane = LaneBattle()
    observation, info = lane.reset(seed=seed)
    for number, action in enumerate(actions, 1):
        before = info
        observation, reward, terminated, truncated, info = lane.step(action)
        assert lane.observation_space.contains(observation)
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
        assert reward in (-2, 1) if terminated else -0.0301 <= reward <= 0.0101
        assert truncated == (number >= 60)
        assert info["won"] == (info["hero"] == info["base"] and terminated)
        assert all(0 <= place < 11 for cell in ("hero", "wave") for place in info[cell])
        assert 1 <= info["minions"] <= 3 and 0 <= info["shield"] <= 12
        in_reach = max(abs(h - t) for h, t in zip(info["hero"], info["tower"])) <= info["reach"]
        assert (reward == -2) == (in_reach and not info["shield"] and not info["won"])
        assert info["shield"] <= max(before["shield"] - 1, 0) or before["shield"] == 0
        if terminated or truncated:
            break


@given(SEEDS, ACTIONS)
@settings(max_examples=30)
def test_the_same_seed_and_moves_give_the_same_battle(seed, actions):
    first, second = make_env(LANE_ID), make_env(LANE_ID)
    second.reset(seed=1)
    steps = [first.reset(seed=seed)], [second.reset(seed=seed)]
    for env, taken in zip((first, second), steps):
        for action in actions:
            taken.append(env.step(action))
            if taken[-1][2] or taken[-1][3]:
                break
    assert len(steps[0]) == len(steps[1])
    for one, other in zip(*steps):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1:] == other[1:]


def test_the_picture_tells_all_that_matters():
    """Two pictures are the same only when hero, minions and tower are the same: where they stand is not hidden from the network."""
    seen, lane = {}, LaneBattle()
    for seed in range(400):
        policy = scripted_policy(seed=seed)
        observation, info = lane.reset(seed=seed)
        while True:
            state = tuple(info[name] for name in ("hero", "wave", "minions", "tower"))
            # a hero or minions over tower or base hide what stands there, and the pieces' own cells can hide one another
            if len({info["hero"], info["wave"], info["tower"], info["base"]}) == 4:
                assert seen.setdefault(observation.tobytes(), state) == state
            observation, _, terminated, truncated, info = lane.step(policy(observation, info))
            if terminated or truncated:
                break
    assert len(seen) > 1000


def test_a_step_does_not_change_pictures_given_before(lane):
    observation, _ = lane.reset(seed=0)
    kept = observation.copy()
    observation[:] = 0
    after = lane.reset(seed=0)[0]
    np.testing.assert_array_equal(after, kept)


def test_render():
    lane = LaneBattle(render_mode="rgb_array")
    lane.reset(seed=0)
    before = lane.render()
    assert before.shape == (352, 352, 3) and before.dtype == np.uint8
    lane.step(MOVE_NAMES.index("N"))
    assert (lane.render() != before).any()
    assert LaneBattle().render() is None


@pytest.mark.parametrize("options", [{"cell": 3}, {"cell": 4.0}, {"max_steps": 0}, {"render_mode": "human"}])
def test_impossible_battles_are_refused(options):
    with pytest.raises(EnvironmentSetupError, match="allowed are"):
        LaneBattle(**options)


def test_max_steps_truncates():
    lane = LaneBattle(max_steps=3)
    lane.reset(seed=0)
    assert [lane.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


# Players


def test_random_loses_the_scripted_player_wins_less_than_half_and_the_perfect_one_wins(lane):
    rates = [evaluate(scripted_policy(seed=seed), lane, seed=seed).win_rate for seed in range(6)]
    assert max(evaluate(random_policy(9, seed), lane, seed=seed).win_rate for seed in range(3)) <= 0.05
    assert max(rates) <= 0.5 and min(rates) >= 0.2 and 0.3 <= statistics.mean(rates) <= 0.45
    assert evaluate(scripted_policy(skill=1), lane, episodes=500).win_rate >= 0.99
    assert evaluate(scripted_policy(skill=0), lane).win_rate <= 0.05


def test_waiting_alone_and_diving_alone_lose(lane):
    assert evaluate(lambda observation, info: 0, lane, episodes=50) == Evaluation(0, 50, 0, (0, pytest.approx(0.0713, abs=1e-4)), pytest.approx(-0.6), pytest.approx((-0.6, -0.6)), 60)
    assert evaluate(lambda observation, info: MOVE_NAMES.index("NE"), lane, episodes=200).win_rate <= 0.05


@pytest.mark.parametrize("skill", [-0.1, 1.1, float("nan")])
def test_impossible_skill(skill):
    with pytest.raises(EnvironmentSetupError, match="0 to 1"):
        scripted_policy(skill)


def test_the_scripted_player_plays_nothing_else():
    with pytest.raises(EnvironmentSetupError, match=LANE_ID):
        record(Counter(), scripted_policy(), steps=3, frame_shape=(3, 40, 50), progress=False)


# Any environment


@pytest.mark.parametrize("env_id, expected", [
    ("autowzry_agent/LaneBattle-v1", LANE_ID), ("autowzry/LaneBattle-v0", LANE_ID), ("CartPole-v7", "CartPole-v1"),
    ("", "environment ''"), ("no_such_module:Thing-v0", "no_such_module"), ("ALE/Pongg-v5", "ALE/Pong-v5"),
])
def test_unknown_ids_are_one_line(env_id, expected):
    with pytest.raises(EnvironmentSetupError, match=expected) as caught:
        make_env(env_id)
    assert "\n" not in str(caught.value)


def test_wrong_options_are_one_line():
    with pytest.raises(EnvironmentSetupError, match="cells") as caught:
        make_env(LANE_ID, cells=3)
    assert "\n" not in str(caught.value)


def test_atari_without_ale_py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(EnvironmentSetupError, match=r"pip install 'autowzry-agent\[atari\]'"):
        make_env("ALE/Pong-v5")


@pytest.mark.parametrize("env, expected", [
    (Counter(space=Box(0, 1, (40, 50, 3), np.float32)), "uint8"), (Counter(shape=(40,)), "pictures"), (Counter(shape=(4, 84, 84)), "pictures"),
    (Counter(space=Discrete(3)), "Discrete"), (Counter(actions=Box(0, 1, (2,), np.float32)), "Discrete"), (Counter(actions=Discrete(3, start=1)), "from 0"),
])
@pytest.mark.parametrize("use", [record, lambda env, policy, episodes: evaluate(policy, env, episodes)])
def test_environments_without_pictures_or_numbered_actions_are_refused(env, expected, use):
    with pytest.raises(EnvironmentSetupError, match=expected):
        use(env, random_policy(3), episodes=1)


@pytest.mark.parametrize("choice", [4, -1, 1.0, None, "left", np.array([1, 2])])
def test_impossible_choices_are_named(choice):
    with pytest.raises(EnvironmentSetupError, match="the policy chose .*actions of this environment are 0 to 3"):
        record(Counter(), lambda observation, info: choice, steps=3, progress=False)


@pytest.mark.parametrize("choice", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_numbers_of_any_kind_are_choices(choice):
    assert record(Counter(), lambda observation, info: choice, steps=3, progress=False).actions.tolist() == [3, 3, 3]


# Recording


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("how", [{"steps": 12}, {"episodes": 3}])
def test_the_buffer_holds_what_the_environment_gave(ends, how):
    env, chosen = Counter(ends=ends), []
    policy = random_policy(4)

    def noting(observation, info):
        assert observation is env.given[-1]
        chosen.append(policy(observation, info))
        return chosen[-1]

    buffer = record(env, noting, frame_shape=(3, 40, 50), progress=False, **how)
    total = 12 if "steps" in how else 15
    np.testing.assert_array_equal(buffer.frames, np.stack(env.given).transpose(0, 3, 1, 2))
    assert buffer.actions.tolist() == chosen and len(buffer) == total
    assert buffer.rewards.tolist() == [1.0] * total
    last, cut = [4, 9, 14][: total // 5], [11] if total == 12 else []
    ended = {"terminated": last, "truncated": cut} if ends == "terminated" else {"terminated": [], "truncated": last + cut}
    assert np.flatnonzero(buffer.terminated).tolist() == ended["terminated"]
    assert np.flatnonzero(buffer.truncated).tolist() == ended["truncated"]
    assert (buffer.num_actions, buffer.frame_shape, buffer.source) == (4, (3, 40, 50), "Counter")


def test_a_battle_that_ends_with_the_last_step_is_not_truncated():
    buffer = record(Counter(), random_policy(4), steps=10, progress=False)
    assert buffer.terminated.sum() == 2 and not buffer.truncated.any()


@pytest.mark.parametrize("shape", [(40, 50), (40, 50, 1), (40, 50, 3), (210, 160, 3), (84, 84, 3), (84, 84)])
@pytest.mark.parametrize("frame_shape", [(3, 84, 84), (1, 84, 84), (3, 40, 50), (1, 50, 40)])
def test_pictures_become_frames(shape, frame_shape):
    buffer = record(Counter(shape), random_policy(4), steps=3, frame_shape=frame_shape, progress=False)
    assert buffer.frames.shape == (4, *frame_shape)
    np.testing.assert_array_equal(buffer.frames, np.broadcast_to(np.arange(4, dtype=np.uint8)[:, None, None, None], buffer.frames.shape))


def test_colours_and_sides_are_kept():
    picture = np.zeros((40, 60, 3), np.uint8)
    picture[:20] = (200, 100, 0)
    frame = module._framer(picture.shape, (3, 80, 90))(picture)
    assert frame[:, 10, 45].tolist() == [200, 100, 0] and not frame[:, 70].any()


def test_frame_stacks_are_refused():
    with pytest.raises(EnvironmentSetupError, match="1 channel"):
        record(Counter(), random_policy(4), steps=1, frame_shape=(4, 84, 84))


@pytest.mark.parametrize("how", [{}, {"steps": 3, "episodes": 3}, {"steps": 0}, {"episodes": -1}])
def test_steps_or_episodes(how):
    with pytest.raises(EnvironmentSetupError, match="give one of them"):
        record(Counter(), random_policy(4), **how)


def test_the_same_seed_records_the_same_battles(lane):
    first, same, other = (record(lane, scripted_policy(seed=1), steps=200, frame_shape=(3, 44, 44), seed=seed, progress=False) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.frames, same.frames)
    np.testing.assert_array_equal(first.rewards, same.rewards)
    assert first.frames.shape != other.frames.shape or (first.frames != other.frames).any()


def test_battles_to_learn_from_are_not_those_to_be_judged_by():
    env = Counter()
    record(env, random_policy(4), episodes=50, seed=3, progress=False)
    evaluate(random_policy(4), env, episodes=50, seed=3)
    assert len(set(env.resets)) == 100


def test_capacity_keeps_the_newest_battles(lane):
    buffer = record(lane, random_policy(9), episodes=40, frame_shape=(3, 44, 44), capacity=100, progress=False)
    assert len(buffer) <= 100 and buffer.capacity == 100


def test_record_adds_to_a_buffer_and_an_interrupted_one_keeps_what_was_played(tmp_path):
    env, calls = Counter(), itertools.count()

    def interrupted(observation, info):
        if next(calls) == 7:
            raise KeyboardInterrupt
        return 0

    buffer = TrainingBuffer(None, (3, 40, 50), 4)
    with pytest.raises(KeyboardInterrupt):
        record(env, interrupted, steps=20, progress=False, buffer=buffer)
    buffer.save(tmp_path)
    saved = TrainingBuffer.load(tmp_path)
    assert len(saved) == 7 and saved.truncated.tolist() == [False] * 6 + [True]
    assert record(env, random_policy(4), steps=10, progress=False, buffer=buffer) is buffer
    assert len(buffer) == 17 and len(buffer.battles) == 4
    with pytest.raises(EnvironmentSetupError, match="the buffer has 4 actions, the environment 5"):
        record(Counter(num_actions=5), random_policy(4), steps=10, buffer=buffer)


def test_a_model_plays_and_is_recorded(lane):
    model = mini()
    by_model, by_policy = (record(lane, player, steps=80, frame_shape=(3, 44, 44), progress=False) for player in (model, model_policy(model)))
    np.testing.assert_array_equal(by_model.actions, by_policy.actions)


def test_atari():
    env = make_env("ALE/Pong-v5")
    buffer = record(env, random_policy(6), steps=30, progress=False)
    assert (len(buffer), buffer.num_actions, buffer.frame_shape, buffer.source) == (30, 6, (3, 84, 84), "ALE/Pong-v5")
    assert buffer.frames.std() > 10 and buffer.truncated.tolist() == [False] * 29 + [True]


# Evaluation


class Told(torch.nn.Module):
    """A model that reads the battle's number from the picture and always chooses the same action."""

    def __init__(self, choice, num_actions=4):
        super().__init__()
        self.register_parameter("weight", torch.nn.Parameter(torch.eye(num_actions)[choice]))
        self.norm, self.num_actions, self.input_shape, self.seen = torch.nn.BatchNorm2d(3), num_actions, (3, 32, 32), []

    def forward(self, frames):
        assert frames.dtype == torch.uint8 and tuple(frames.shape[1:]) == self.input_shape
        assert not self.training and torch.is_inference_mode_enabled()
        self.seen.append(len(frames))
        return self.weight.expand(len(frames), -1)


@pytest.mark.parametrize("rewards, wins", [(1.0, 8), (-1.0, 0), (0.0, 0)])
def test_a_return_above_zero_wins_where_the_environment_says_nothing(rewards, wins):
    result = evaluate(random_policy(4), Counter(rewards=rewards), episodes=8)
    assert result == Evaluation(wins, 8, wins / 8, module._wilson(wins, 8), 5 * rewards, (5 * rewards, 5 * rewards), 5)


def test_intervals_against_known_values():
    for wins, episodes, interval in ((0, 1, (0, 0.79346)), (1, 1, (0.20654, 1)), (1, 11, (0.01623, 0.37736)), (25, 100, (0.17545, 0.34305)), (50, 100, (0.40383, 0.59617)), (100, 100, (0.96301, 1))):
        assert module._wilson(wins, episodes) == pytest.approx(interval, abs=1e-5)
    low, high = module._mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (low + high) / 2 == pytest.approx(2.5) and high - low == pytest.approx(2 * 1.959964 * statistics.stdev([1, 2, 3, 4]) / 2)


@given(st.integers(1, 2000).flatmap(lambda episodes: st.tuples(st.integers(0, episodes), st.just(episodes))))
def test_the_interval_holds_the_rate(counts):
    wins, episodes = counts
    low, high = module._wilson(wins, episodes)
    assert 0 <= low <= wins / episodes + 1e-12 and wins / episodes - 1e-12 <= high <= 1


def test_an_evaluation_reads_as_a_sentence(lane):
    result = evaluate(scripted_policy(skill=1), lane, episodes=100)
    assert str(result).startswith("100.0% wins over 100 battles (95% interval 96.3% to 100.0%), mean return 0.")
    with pytest.raises(AttributeError):
        result.wins = 0


def test_copies_side_by_side_give_the_battles_of_one():
    model, env = mini(), make_env(LANE_ID, max_steps=7)
    results = evaluate(model, env, episodes=37, copies=1), evaluate(model, env, episodes=37), evaluate(model_policy(model), env, episodes=37)
    assert results[0] == results[1] == results[2] and results[0].mean_length <= 7


def test_only_the_built_in_battle_is_copied_unasked(lane, monkeypatch):
    made = []
    monkeypatch.setattr(module.gym, "make", lambda spec: made.append(spec.id) or lane.spec.make())
    evaluate(Told(0), Counter(), episodes=3)
    assert not made
    evaluate(mini(), lane, episodes=3)
    assert made == [LANE_ID] * 2
    evaluate(scripted_policy(), lane, episodes=3)
    assert len(made) == 2


def test_every_policy_gets_the_same_battles():
    env = Counter()
    for player in (random_policy(4), Told(1)):
        evaluate(player, env, episodes=5, seed=9)
    evaluate(random_policy(4), env, episodes=7, seed=9)
    assert env.resets[:5] == env.resets[5:10] == env.resets[10:15]


def test_modes_are_restored_also_after_an_error(lane):
    model = mini()
    model.trunk.eval()
    modes = [part.training for part in model.modules()]
    statistics_before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, lane, episodes=3)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, statistics_before[name]) for name, value in model.state_dict().items())
    model.forward = lambda frames: 1 / 0
    with pytest.raises(ZeroDivisionError):
        evaluate(model, lane, episodes=3)
    assert [part.training for part in model.modules()] == modes


def test_a_model_takes_the_action_of_highest_value_and_its_own_size():
    model, env, taken = Told(2), Counter(shape=(40, 50)), []
    step = env.step
    env.step = lambda action: taken.append(action) or step(action)
    evaluate(model, env, episodes=2)
    assert taken == [2] * 10 and model.seen == [1] * 10


def test_models_and_environments_that_do_not_fit(lane):
    with pytest.raises(EnvironmentSetupError, match="the model has 4 actions, the environment 9"):
        evaluate(Told(0), lane)
    with pytest.raises(EnvironmentSetupError, match="episodes"):
        evaluate(random_policy(9), lane, episodes=0)


def test_the_module_loads_without_figures_and_widgets():
    code = textwrap.dedent("""
        import sys
        import autowzry_agent.environment
        assert not {"matplotlib", "ipywidgets", "ale_py"} & set(sys.modules), sorted(sys.modules)
    """)
    subprocess.run([sys.executable, "-c", code], check=True)

"""The settings: what the notebook cannot test, and whatever a person may write into a settings file."""
import copy
import dataclasses
import json
import math
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autowzry_agent.config import Config, ConfigError, default_config_path

FIELDS = [field.name for field in dataclasses.fields(Config)]
PLACES = {name: ("training", name) for name in FIELDS} | {
    "model_mode": ("model", "mode"),
    "num_actions": ("model", "num_actions"),
    "input_shape": ("model", "input_shape"),
}
TRIES = settings(
    max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def numbers(low, high, **kwargs):
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **kwargs)


def counts(low):
    return st.integers(low, 2**63 - 1)


VALID = dict(
    model_mode=st.sampled_from(["mini", "full", "high"]),
    num_actions=st.integers(1, 32767),
    input_shape=st.tuples(st.integers(1, 64), counts(32), counts(32)),
    use_amp=st.sampled_from([True, False, None]),
    amp_dtype=st.sampled_from(["float16", "bfloat16"]),
    amp_on_cpu=st.booleans(),
    init_scale=numbers(1, 1e38),
    growth_factor=numbers(1, None, exclude_min=True),
    backoff_factor=numbers(0.5, 1, exclude_max=True),
    growth_interval=counts(1),
    batch_size=counts(2),
    learning_rate=numbers(0, None, exclude_min=True),
    gamma=numbers(0, 1),
    num_epochs=counts(1),
    steps_per_epoch=st.none() | counts(1),
    use_target_network=st.booleans(),
    target_update_epochs=counts(1),
    double_dqn=st.booleans(),
    cql_alpha=numbers(0, None),
    grad_clip=st.none() | numbers(0, None, exclude_min=True),
    loss=st.sampled_from(["huber", "mse"]),
    evaluate_epochs=counts(1),
    on_divergence=st.sampled_from(["stop", "fp32"]),
    seed=counts(0),
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:0", "cuda:17"]),
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=80)
    | st.dates()
    | st.binary(max_size=8)
    | st.sampled_from(["mini", "True", "None", "1e-4", "nan", "cuda:", "cuda:٣", "cuda\n"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my settings 设置"
    folder.mkdir()
    return folder


def write(folder, text, name="王者 agent.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path):
    """The message of the error that reading this file must raise; it names the file."""
    with pytest.raises(ConfigError) as error:
        Config.from_yaml(path)
    assert str(path) in str(error.value)
    return str(error.value)


# Any valid config


def test_every_field_is_tried():
    assert list(VALID) == FIELDS


@TRIES
@given(values=st.fixed_dictionaries(VALID))
def test_a_valid_config_survives_every_road(folder, values):
    config = Config(**values)
    for name, value in values.items():
        if (name, value) != ("use_amp", None):
            assert getattr(config, name) == value
    assert config.use_amp_automatic == (values["use_amp"] is None)
    assert config.use_amp is (values["model_mode"] == "mini" if values["use_amp"] is None else values["use_amp"])

    path = folder / "a config.yaml"
    config.save_yaml(path)
    loaded = Config.from_yaml(path)
    assert loaded == config and not loaded.use_amp_automatic
    first = path.read_bytes()
    loaded.save_yaml(path)
    assert path.read_bytes() == first

    assert Config(**json.loads(json.dumps(config.as_dict()))) == config
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.replace()):
        assert twin == config and twin.use_amp_automatic == config.use_amp_automatic


@TRIES
@given(values=st.fixed_dictionaries({}, optional=VALID))
def test_a_saved_file_means_the_same_to_other_yaml_readers(folder, values):
    config = Config(**values)
    config.save_yaml(folder / "config.yaml")
    plain = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert {name: plain[section][key] for name, (section, key) in PLACES.items()} == config.as_dict()


# Any wrong value


@TRIES
@given(name=st.sampled_from(FIELDS), value=ANYTHING)
def test_the_constructor_takes_a_value_or_names_it(folder, name, value):
    try:
        config = Config(**{name: value})
    except ConfigError as e:
        assert re.match(rf"{name} is .+, but must be .+\.$", str(e), re.S)
    else:
        config.save_yaml(folder / "config.yaml")
        assert Config.from_yaml(folder / "config.yaml") == config


@TRIES
@given(name=st.sampled_from(FIELDS), value=ANYTHING)
def test_a_file_takes_a_value_or_names_it(folder, name, value):
    section, key = PLACES[name]
    path = write(folder, yaml.safe_dump({section: {key: value}}, allow_unicode=True))
    try:
        Config.from_yaml(path)
    except ConfigError as e:
        assert str(e).startswith(str(path))
        # a character that YAML cannot hold breaks the file before there is a key
        assert f"{section}.{key} is " in str(e) and "but must be " in str(e) or "broken YAML" in str(e)


@TRIES
@given(text=st.text(st.sampled_from("modeltraining_batchsizegamma:  \n\n-[]{}#&*!|>'\"%@`,?~0123456789.e\t\\U学\x07\ud800"), max_size=60))
def test_no_text_raises_anything_else(folder, text):
    path = folder / "text.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Config.from_yaml(path)
        except ConfigError as e:
            assert str(e).startswith(str(path))


@TRIES
@given(data=st.binary(max_size=40))
def test_no_bytes_raise_anything_else(folder, data):
    path = folder / "bytes.yaml"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Config.from_yaml(path)
        except ConfigError as e:
            assert str(e).startswith(str(path))


# Mistakes that people make, and what they are told


@pytest.mark.parametrize(
    "text, told",
    [
        ("training:\n  batchsize: 64", "line 2: training.batchsize is not a setting. The nearest known key is training.batch_size."),
        ("training:\n  Learning_Rate: 1", "The nearest known key is training.learning_rate."),
        ("training:\n  mode: mini", "line 2: training.mode is not a setting. Its place is model.mode."),
        ("model:\n  batch_size: 2", "model.batch_size is not a setting. Its place is training.batch_size."),
        ("model:\n  model_mode: mini", "model.model_mode is not a setting. Its place is model.mode."),
        ("training:\n  zzz: 1", "training.zzz is not a setting. Known keys: model.mode, "),
        ("training:\n  [1, 2]: 1", "line 2: training.a list or mapping is not a setting."),
        ("batch_size: 2", "line 1: batch_size stands in no section. Its place is training.batch_size."),
        ('training:\n  use_amp: "false"', 'line 2: training.use_amp is "false", but must be true or false, without quotes, or null'),
        ("training:\n  use_amp: 'yes'", "training.use_amp is 'yes', but must be true or false"),
        ("training:\n  use_amp: None", "line 2: training.use_amp is None, but must be true or false, without quotes, or null"),
        ("training:\n  use_amp: 1", "training.use_amp is 1, but must be true or false"),
        ("training:\n  double_dqn:", "training.double_dqn is null, but must be true or false"),
        ("training:\n  batch_size: 2.5", "line 2: training.batch_size is 2.5, but must be a whole number, at least 2."),
        ("training:\n  batch_size: true", "training.batch_size is true, but must be a whole number, at least 2."),
        ('training:\n  batch_size: "32"', 'training.batch_size is "32", but must be a whole number, at least 2.'),
        ("training:\n  batch_size: 0", "training.batch_size is 0, but must be a whole number, at least 2."),
        ("training:\n  batch_size: 1", "training.batch_size is 1, but must be a whole number, at least 2."),
        ("training:\n  batch_size: [32]", "training.batch_size is [32], but must be a whole number"),
        ("training:\n  batch_size: {a: 1}", "training.batch_size is {a: 1}, but must be a whole number"),
        ("training:\n  batch_size: |\n    some\n    text", "training.batch_size is | some text, but must be a whole number"),
        ("training:\n  learning_rate: -1e-4", "training.learning_rate is -1e-4, but must be a finite number above 0."),
        ("training:\n  learning_rate: 0", "training.learning_rate is 0, but must be a finite number above 0."),
        ("training:\n  learning_rate: .nan", "training.learning_rate is .nan, but must be a finite number above 0."),
        ("training:\n  learning_rate: inf", "training.learning_rate is inf, but must be a finite number above 0."),
        ("training:\n  learning_rate: 1e999", "training.learning_rate is 1e999, but must be a finite number above 0."),
        ("training:\n  gamma: 1.5", "training.gamma is 1.5, but must be a finite number from 0 to 1."),
        ("training:\n  init_scale: 0.5", "training.init_scale is 0.5, but must be a finite number from 1 to 1e38."),
        ("training:\n  growth_factor: 1", "training.growth_factor is 1, but must be a finite number above 1."),
        ("training:\n  backoff_factor: 1.0", "training.backoff_factor is 1.0, but must be a finite number of at least 0.5 and below 1."),
        ("training:\n  loss: l1", "training.loss is l1, but must be huber or mse."),
        ("training:\n  device: gpu", "training.device is gpu, but must be auto, cpu, cuda, or cuda:N"),
        ("training:\n  seed: -1", "training.seed is -1, but must be a whole number, at least 0."),
        ("model:\n  mode: tiny", "line 2: model.mode is tiny, but must be mini, full or high."),
        ("model:\n  input_shape: [3, 31, 84]", "model.input_shape is [3, 31, 84], but must be three whole numbers"),
        ("model:\n  input_shape: [84, 84]", "model.input_shape is [84, 84], but must be three whole numbers"),
        ("model:\n  input_shape: [65, 84, 84]", "1 to 64 channels, height and width of at least 32 pixels."),
        ("model:\n  input_shape: 84", "model.input_shape is 84, but must be three whole numbers"),
        ("model:\n  input_shape: [3, [84], 84]", "model.input_shape is [3, [84], 84], but must be three whole numbers"),
        ("training:\n  seed: 1\n  gamma: 0.9\n  seed: 2", "line 4: seed is here for the second time, but must stand once; the first is on line 2."),
        ("model:\n  mode: mini\nmodel:\n  mode: full", "line 3: model is here for the second time"),
        ("training: 3", "line 1: training must hold keys, one a line and indented."),
        ("training:\n- batch_size", "line 1: training must hold keys, one a line and indented."),
        ("", "is empty, but must hold the sections model and training."),
        ("# only a comment\n", "is empty, but must hold the sections model and training."),
        ("- mini\n- full", "holds a list, but must hold the sections model and training."),
        ("mini", "holds a single value, but must hold the sections model and training."),
        ("model:\n  mode: [mini", "line 2: broken YAML, "),
        ("training:\n\tbatch_size: 2", "line 2: broken YAML, "),
        ("model:\n  mode: mini\n---\nmodel:", "line 3: broken YAML, "),
        ("model:\n  mode: *none", "line 2: broken YAML, "),
        ("model:\n  mode: mi\x07ni", "line 2: broken YAML, character U+0007 cannot stand in it."),
        ('model:\n  mode: "\\UFFFFFFFF"', "broken YAML, "),
        ("[" * 2000, "broken YAML, "),
    ],
)
def test_a_mistake_is_told(folder, text, told):
    assert told in refused(write(folder, text))


def test_many_mistakes_are_told_at_once_and_in_order(folder):
    path = write(folder, "training:\n  gamma: 2\n  batchsize: 1\nmodel:\n  mode: tiny\n  input_shape: [3, 8, 8]\n")
    told = refused(path).splitlines()
    assert [re.match(r", line (\d+): ([\w.]+) is ", line.removeprefix(str(path))).groups() for line in told] == [
        ("2", "training.gamma"),
        ("3", "training.batchsize"),
        ("5", "model.mode"),
        ("6", "model.input_shape"),
    ]


def test_a_long_value_is_cut_short(folder):
    assert len(refused(write(folder, f"training:\n  loss: {'x' * 9999}"))) < 400
    with pytest.raises(ConfigError) as error:
        Config(loss="x" * 9999, batch_size=-(10**5000))
    assert len(str(error.value)) < 400


def test_a_file_in_another_encoding_is_told(folder):
    path = folder / "gbk.yaml"
    path.write_bytes("model:\n  mode: mini  # 小模型\n".encode("gbk"))
    assert "line 2: this is not UTF-8 text. Save the file with the encoding UTF-8." in refused(path)
    path.write_bytes("model:\n  mode: mini\n".encode("utf-16"))
    assert "line 1: this is not UTF-8 text." in refused(path)


def test_a_path_that_is_no_file_is_told(folder):
    assert "it is a folder" in refused(folder)
    assert "there is no such file" in refused(folder / "没有.yaml")
    with pytest.raises(ConfigError, match="agent"):
        default_config_path("agnet")


def test_the_constructor_tells_all_mistakes():
    with pytest.raises(ConfigError) as error:
        Config(batch_size=0, gamma="0.9", model_mode=None)
    assert str(error.value).splitlines() == [
        "model_mode is None, but must be mini, full or high.",
        "batch_size is 0, but must be a whole number, at least 2.",
        "gamma is '0.9', but must be a finite number from 0 to 1.",
    ]
    with pytest.raises(ConfigError, match="The nearest known key is training.batch_size"):
        Config().replace(batchsize=3)
    with pytest.raises(ConfigError, match="gamma is 2"):
        Config().replace(gamma=2)


# What is taken


@pytest.mark.parametrize(
    "text, changes",
    [
        ("learning_rate: 1e-4", {}),
        ("learning_rate: 5e-4", dict(learning_rate=0.0005)),
        ("learning_rate: 1", dict(learning_rate=1.0)),
        ("init_scale: 1e4", dict(init_scale=10000.0)),
        ("init_scale: 1.0e4", dict(init_scale=10000.0)),
        ("num_epochs: 1e3", dict(num_epochs=1000)),
        ("batch_size: 64.0", dict(batch_size=64)),
        ("seed: 010", dict(seed=10)),
        ("grad_clip: null", dict(grad_clip=None)),
        ("grad_clip:", dict(grad_clip=None)),
        ("use_amp: yes", dict(use_amp=True)),
        ("use_amp: False", dict(use_amp=False)),
        ("use_amp: ~", dict(use_amp=None)),
        ("device: cuda:1", dict(device="cuda:1")),
        ("device: 'cpu'", dict(device="cpu")),
    ],
)
def test_a_value_is_read(folder, text, changes):
    config = Config.from_yaml(write(folder, f"training:\n  {text}"))
    assert config == Config(**changes)
    for field in dataclasses.fields(Config):
        assert type(getattr(config, field.name)) is type(getattr(Config(**changes), field.name))


def test_numbers_of_numpy_become_plain():
    np = pytest.importorskip("numpy")
    config = Config(batch_size=np.int64(64), gamma=np.float32(0.5), input_shape=(3, np.int32(64), 48))
    assert [type(v) for v in (config.batch_size, config.gamma, config.input_shape[1])] == [int, float, int]


def test_what_is_left_out_takes_its_default(folder):
    assert Config.from_yaml(write(folder, "model:\n")) == Config()
    assert Config.from_yaml(write(folder, "training:\n  # gamma: 0.9\nmodel:\n  mode: high")) == Config(model_mode="high")


def test_a_byte_order_mark_is_no_trouble(folder):
    path = folder / "notepad.yaml"
    path.write_bytes("\ufeffmodel:\r\n  mode: mini  # 小模型\r\n".encode("utf-8"))
    assert Config.from_yaml(str(path)).model_mode == "mini"


def test_unknown_sections_are_left_alone_with_one_warning(folder):
    path = write(folder, "device:\n  id: 0\nlogging: !Level {level: info}\nversion: 3\nmodel:\n  mode: mini\n")
    with pytest.warns(UserWarning) as caught:
        assert Config.from_yaml(path) == Config(model_mode="mini")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert str(path) in str(caught[0].message) and "device, logging, version." in str(caught[0].message)


# use_amp


@pytest.mark.parametrize("mode, automatic", [("mini", True), ("full", False), ("high", False)])
def test_use_amp_is_settled_by_every_road(folder, mode, automatic):
    for given in (None, True, False):
        expected = automatic if given is None else given
        text = f"model:\n  mode: {mode}\ntraining:\n  use_amp: {json.dumps(given)}"
        for config in (
            Config(model_mode=mode, use_amp=given),
            Config.from_yaml(write(folder, text)),
            Config(use_amp=given).replace(model_mode=mode),
            Config(use_amp=True).replace(model_mode=mode, use_amp=given),
        ):
            assert config.use_amp is expected and config.use_amp_automatic is (given is None)
            config.save_yaml(folder / "saved.yaml")
            saved = Config.from_yaml(folder / "saved.yaml")
            assert saved.use_amp is expected and not saved.use_amp_automatic
            assert saved.replace(model_mode="mini").use_amp is expected


def test_replace_keeps_who_decided():
    config = Config(model_mode="mini")
    assert config.replace(batch_size=8).use_amp_automatic
    assert config.replace(batch_size=8).replace(model_mode="full").use_amp is False
    assert config.replace(use_amp=True).replace(model_mode="full").use_amp is True
    assert config == Config(model_mode="mini")


def test_a_config_cannot_be_changed():
    config = Config()
    for name in ("batch_size", "use_amp", "use_amp_automatic", "_use_amp_automatic", "new"):
        with pytest.raises(AttributeError):
            setattr(config, name, True)
    assert len({Config(), Config(use_amp=False), Config(seed=1)}) == 2


# The files


def test_the_shipped_file_is_the_defaults():
    path = default_config_path()
    plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [(section, key) for section in plain for key in plain[section]] == list(PLACES.values())
    assert plain["training"]["use_amp"] is None
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    assert {name: plain[section][key] for name, (section, key) in PLACES.items()} == defaults | {"input_shape": [3, 84, 84]}
    assert Config.from_yaml(path) == Config() and Config.from_yaml(path).use_amp_automatic


def test_every_key_of_the_shipped_file_has_a_comment():
    lines = default_config_path().read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"  \w+:", line)]
    assert len(keys) == len(FIELDS)
    for number in keys:
        assert re.match(r"  # .{20,}[.]$", lines[number - 1]), lines[number]


def test_a_saved_file_has_the_form_of_the_shipped_one(folder):
    Config().save_yaml(folder / "saved.yaml")
    shipped = default_config_path().read_text(encoding="utf-8")
    assert (folder / "saved.yaml").read_bytes().decode("utf-8") == shipped.replace("use_amp: null", "use_amp: false")


def test_saving_makes_the_folder_and_leaves_nothing_beside(folder):
    path = folder / "run 1" / "配置.yaml"
    Config(seed=1).save_yaml(path)
    Config(seed=2).save_yaml(str(path))
    assert Config.from_yaml(path).seed == 2
    assert os.listdir(path.parent) == [path.name]


def test_a_failed_save_leaves_the_old_file_whole(folder, monkeypatch):
    path = folder / "config.yaml"
    Config(seed=1).save_yaml(path)

    def fail(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        Config(seed=2).save_yaml(path)
    assert Config.from_yaml(path).seed == 1 and os.listdir(folder) == [path.name]


def test_a_place_that_cannot_be_written_is_told(folder):
    with pytest.raises(ConfigError, match="it is a folder"):
        Config().save_yaml(folder)
    file = write(folder, "model:")
    with pytest.raises(ConfigError, match="cannot be written"):
        Config().save_yaml(file / "config.yaml")
    assert os.listdir(folder) == [file.name]


def test_no_warning_and_no_heavy_import(folder):
    code = (
        "import sys; from autowzry_agent.config import Config, default_config_path\n"
        "Config.from_yaml(default_config_path()).save_yaml(sys.argv[1]); Config.from_yaml(sys.argv[1])\n"
        "assert not {'torch', 'matplotlib', 'ipywidgets', 'IPython'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-X", "warn_default_encoding", "-c", code, str(folder / "设置 1.yaml")],
        check=True,
        cwd=Path(__file__).parent,
    )


def test_a_config_shows_itself_as_a_table():
    shown = Config(model_mode="mini")._repr_markdown_().splitlines()
    assert len(shown) == len(FIELDS) + 2 and all(line.count("|") == 4 for line in shown)
    assert "| training.use_amp | true (by the mode) |" in "\n".join(shown)
    assert math.isclose(eval(repr(Config(gamma=0.5))).gamma, 0.5)

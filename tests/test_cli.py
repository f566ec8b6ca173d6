"""The commands as a user runs them: as processes, with their files, their errors and Ctrl-C."""
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from PIL import Image

from autowzry_agent.buffer import TrainingBuffer
from autowzry_agent.config import Config, default_config_path
from autowzry_agent.model import load_model
from autowzry_agent.trainer import History, read_checkpoint

COMMANDS = "autowzry_train", "autowzry_record", "autowzry_import", "autowzry_evaluate", "autowzry_compare"


# Every warning is an error, but for those of two libraries that open their own files without an encoding.
STRICT = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error,ignore::EncodingWarning:matplotlib.font_manager,ignore::EncodingWarning:ale_py.roms"}


def command(name, *args):
    "A console command, as it is installed beside this Python."
    return [shutil.which(name, path=sysconfig.get_path("scripts")), *map(str, args)]


def run(name, *args, cwd=None, code=0):
    "Run a command to its end and return what it printed."
    done = subprocess.run(command(name, *args), cwd=cwd, capture_output=True, text=True, encoding="utf-8", env=STRICT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "A folder with a space and Chinese in its name, in it a small buffer and settings for a run of seconds."
    place = tmp_path_factory.mktemp("我的 对局")
    run("autowzry_record", "battles", "--episodes", 10, cwd=place)
    Config.from_yaml(default_config_path("lane")).replace(steps_per_epoch=3, batch_size=4, num_epochs=2).save_yaml(place / "设置.yaml")
    return place


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_every_option(name):
    told = run(name, "--help")
    options = re.findall(r"^  (?:-h, )?--([\w-]+)", told, flags=re.M)
    assert options and all(re.fullmatch("[a-z]+", option) for option in options), options
    arguments = re.split(r"\n(?=  \S)", re.split("positional arguments:|options:", told, maxsplit=1)[1])
    for argument in arguments:
        words = re.sub(r"\(default: .*?\)|options:", "", argument).split()
        if words: assert len(words) > 3, f"not explained: {argument}"


@pytest.fixture(scope="module")
def trained(place):
    "What a short training printed; its run is in the folder `结果 1`."
    return run("autowzry_train", "--buffer", "battles", "--config", "设置.yaml", "--battles", 4, "--out", "结果 1", cwd=place)


def test_train_on_a_buffer_writes_the_run_folder(place, trained):
    folder = place / "结果 1"
    assert {file.name for file in folder.iterdir()} == {"config.yaml", "run.json", "checkpoint.pt", "model_best.pt", "model_last.pt", "history.csv", "history.json", "curves.png"}
    assert "[Trainer] Init" in trained and re.search(r"^  Epoch 1/2, Avg Loss: \d+\.\d{4}", trained, flags=re.M)
    assert re.search(r"^No problem found: .*\n(.*\n)*\n(GOOD|NOTE): ", trained, flags=re.M)
    for who in ("Random policy", "Recorded player", "Trained policy"): assert re.search(rf"^{who}: \d+\.\d% wins$", trained, flags=re.M)
    assert load_model(folder / "model_best.pt").mode == "mini" and len(History.load(folder).loss) == 6
    assert Config.from_yaml(folder / "config.yaml").steps_per_epoch == 3


def test_options_win_over_the_settings_file(place):
    run("autowzry_train", "--buffer", "battles", "--config", "设置.yaml", "--epochs", 1, "--amp", "false", "--seed", 7, "--device", "cpu", "--battles", 1, "--out", "options", cwd=place)
    config = Config.from_yaml(place / "options" / "config.yaml")
    assert (config.num_epochs, config.use_amp, config.seed, config.device) == (1, False, 7, "cpu")


def test_resume_goes_on_from_the_checkpoint(place, trained):
    shutil.copytree(place / "结果 1", place / "run")
    told = run("autowzry_train", "--resume", "run", "--epochs", 3, "--battles", 1, cwd=place)
    assert "[Trainer] Resumed after epoch 2" in told and "num_epochs: 2 in the checkpoint, 3 in the config" in told
    assert len(History.load(place / "run").epoch_loss) == 3


@pytest.mark.parametrize("amp", [[], ["amp_on_cpu"]], ids=["FP32", "FP16"])
def test_a_run_that_diverges_leaves_its_last_good_state_and_can_go_on(place, amp):
    name = f"hopeless {len(amp)}"
    hopeless = Config.from_yaml(place / "设置.yaml").replace(learning_rate=1e20, use_amp=bool(amp), amp_on_cpu=bool(amp), device="cpu")
    hopeless.save_yaml(place / f"{name}.yaml")
    done = subprocess.run(command("autowzry_train", "--buffer", "battles", "--config", f"{name}.yaml", "--battles", 1, "--out", name), cwd=place, capture_output=True, text=True, encoding="utf-8", env=STRICT)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr and last.startswith("autowzry_train: Training diverged in epoch 1"), done.stderr
    assert "PROBLEM: diverged" in done.stdout and "--resume" in done.stdout and "1e+20 to 5e+19" in last
    for file in ("model_last.pt", "curves.png", "history.csv", "run.json"): assert (place / name / file).exists()
    assert all(value.isfinite().all() for value in load_model(place / name / "model_last.pt").state_dict().values())
    hopeless.replace(learning_rate=1e-4).save_yaml(place / name / "config.yaml")
    assert "Trained policy" in run("autowzry_train", "--resume", name, cwd=place)


def test_a_run_is_not_written_over(place, trained):
    files = lambda: {file.name: file.read_bytes() for file in (place / "结果 1").iterdir()}
    before = files()
    for options, told in [
        (["--buffer", "battles", "--out", "结果 1"], "holds a run already"),
        (["--resume", "结果 1", "--mode", "full"], "cannot change"),
        (["--resume", "结果 1", "--device", "cuda:77"], "cuda:77"),
    ]: assert told in run("autowzry_train", *options, cwd=place, code=1)
    assert files() == before


def test_a_trained_model_plays_and_records(place, trained):
    assert "wins over 3 battles" in run("autowzry_evaluate", "结果 1", "--battles", 3, cwd=place)
    run("autowzry_record", "played", "--policy", "结果 1", "--steps", 20, cwd=place)
    assert len(TrainingBuffer.load(place / "played")) == 20
    assert "9 actions" in run("autowzry_record", "pong", "--env", "ALE/Pong-v5", "--policy", "结果 1", "--steps", 5, cwd=place, code=1)


def test_screenshots_are_imported_and_trained_on(tmp_path):
    (tmp_path / "截图").mkdir()
    for number in range(1, 8): Image.new("RGB", (96, 54), (30 * number, 80, 120)).save(tmp_path / "截图" / f"{number}.png")
    (tmp_path / "截图" / "battle.csv").write_text("action,reward,terminated\n" + "3,0.01,0\n" * 5 + "0,1,1\n", encoding="utf-8")
    run("autowzry_import", "截图", "对局", "--size", "32", cwd=tmp_path)
    told = run("autowzry_train", "--buffer", "对局", "--mode", "mini", "--epochs", 1, "--out", "run", cwd=tmp_path)
    assert "Not evaluated" in told and load_model(tmp_path / "run" / "model_last.pt").input_shape == (3, 32, 32)


@pytest.mark.skipif(os.name == "nt", reason="a signal that is Ctrl-C to one process alone does not exist on Windows")
def test_ctrl_c_keeps_the_checkpoint_and_says_how_to_resume(place):
    process = subprocess.Popen(command("autowzry_train", "--buffer", "battles", "--config", "设置.yaml", "--epochs", 100000, "--battles", 1, "--out", "long run"), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=STRICT)
    checkpoint = place / "long run" / "checkpoint.pt"
    while process.poll() is None and not (checkpoint.exists() and read_checkpoint(checkpoint)["epoch"] > 2): time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert re.search("autowzry_train --resume 'long run'$", told, flags=re.M) and "Traceback" not in told
    reached = read_checkpoint(checkpoint)["epoch"]
    assert len(History.load(place / "long run").epoch_loss) >= reached and load_model(place / "long run" / "model_best.pt")
    assert f"holds epoch {reached} of 100000" in told
    run("autowzry_train", "--resume", "long run", "--epochs", reached + 1, "--battles", 1, cwd=place)
    assert len(History.load(place / "long run").epoch_loss) == reached + 1


@pytest.mark.skipif(os.name == "nt", reason="a signal that is Ctrl-C to one process alone does not exist on Windows")
def test_ctrl_c_keeps_what_was_recorded(place):
    process = subprocess.Popen(command("autowzry_record", "cut", "--steps", 10**9), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env=STRICT)
    told = ""
    while not re.search(r"\D[1-9]\d*/1000000000", told) and process.poll() is None: told += process.stderr.read(1)  # until the progress bar has moved
    process.send_signal(signal.SIGINT)
    told += process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "what was recorded is kept" in told, told
    assert len(TrainingBuffer.load(place / "cut")) > 0


@pytest.mark.parametrize("name, args, told", [
    ("autowzry_train", ["--config", "nothing.yaml"], "nothing.yaml"),
    ("autowzry_train", ["--buffer", "nothing"], "nothing"),
    ("autowzry_train", ["--buffer", "battles", "--mode", "tiny"], "mini, full or high"),
    ("autowzry_train", ["--buffer", "battles", "--amp", "maybe"], "auto, true and false"),
    ("autowzry_train", ["--buffer", "battles", "--device", "cuda:77"], "cuda:77"),
    ("autowzry_train", ["--buffer", "battles", "--epochs", "0"], "--epochs"),
    ("autowzry_train", ["--buffer", "battles", "--config", default_config_path("agent")], "(3, 84, 84)"),
    ("autowzry_train", ["--battles", "-5"], "--battles"),
    ("autowzry_train", ["--resume", "nothing"], "holds no run"),
    ("autowzry_record", ["out", "--seed", "-1"], "--seed"),
    ("autowzry_record", ["out", "--env", "ALE/Pongg-v5"], "Pong"),
    ("autowzry_record", ["out", "--env", "CartPole-v1"], "pictures"),
    ("autowzry_record", ["out", "--env", "Pendulum-v1"], "Discrete"),
    ("autowzry_record", ["out", "--steps", "0"], "steps"),
    ("autowzry_record", ["out", "--size", "big"], "84x84"),
    ("autowzry_import", ["nothing", "out"], "nothing"),
    ("autowzry_evaluate", ["nothing.pt"], "nothing.pt"),
])
def test_an_error_is_one_line(place, name, args, told):
    error = run(name, *args, cwd=place, code=1)
    assert told in error and error.startswith(f"{name}: ") and error.count("\n") == 1, error
    assert not (place / "out").exists()


def test_a_console_without_the_signs_does_not_stop_a_command(place):
    done = subprocess.run(command("autowzry_record", "盘", "--episodes", 1), cwd=place, capture_output=True, env={**STRICT, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"\\xd7" in done.stdout, done.stderr


def test_an_unknown_option_is_told(place):
    assert "--epoch5" in run("autowzry_train", "--epoch5", "5", cwd=place, code=2)


def test_record_and_train_on_atari_frames(tmp_path):
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    run("autowzry_record", "--env", "ALE/Pong-v5", "--steps", 60, "pong", cwd=tmp_path)
    buffer = TrainingBuffer.load(tmp_path / "pong")
    assert (len(buffer), buffer.num_actions, buffer.frame_shape, buffer.source) == (60, 6, (3, 84, 84), "ALE/Pong-v5")
    assert buffer.frames.std() > 10
    told = run("autowzry_train", "--buffer", "pong", "--epochs", 1, "--mode", "mini", "--battles", 1, "--out", "run", cwd=tmp_path)
    assert "Trained policy" in told
    assert load_model(tmp_path / "run" / "model_last.pt").num_actions == 6


def test_the_demo_learns_to_win(tmp_path):
    "The main job: record, train by lane.config.yaml, evaluate over 200 battles each."
    told = run("autowzry_train", "--out", "run", cwd=tmp_path)
    rates = {who: float(re.search(rf"^{who}: (\d+\.\d)% wins$", told, flags=re.M)[1]) for who in ("Random policy", "Recorded player", "Trained policy")}
    assert rates["Random policy"] <= 5 and rates["Recorded player"] <= 50 and rates["Trained policy"] >= 85, rates
    if sys.platform == "linux":
        import resource
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 2**20  # in KiB: 2 GB

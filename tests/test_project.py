"""The project as a whole: notebooks and modules in step, docs and README in step, what ships, what imports what."""
import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autowzry_agent"
SCRIPTS = Path(sysconfig.get_path("scripts"))
COMMANDS = {"autowzry_train", "autowzry_record", "autowzry_import", "autowzry_evaluate", "autowzry_compare"}
SHIPPED_SETTINGS = {"agent.config.yaml", "lane.config.yaml"}

MAY_IMPORT = {
    "config": set(),
    "model": {"config"},
    "buffer": {"config"},
    "trainer": {"config", "model", "buffer"},
    "monitor": {"config", "trainer"},
    "dashboard": {"config", "monitor", "trainer"},
    "environment": {"config", "buffer", "model"},
    "compare": {"config", "trainer", "monitor"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
WITHOUT_FIGURES = ["config", "model", "buffer", "trainer", "environment"]
FOR_FIGURES = {"matplotlib", "ipywidgets"}
STRICT = ["-X", "warn_default_encoding", "-W", "error", "-W", "ignore::EncodingWarning:matplotlib.font_manager"]
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_"))


def script(name):
    """A command of this Python's environment; on Windows its file has an ending."""
    return shutil.which(name, path=SCRIPTS)


def run(*command, cwd=ROOT, **environment):
    """What a command prints; when it fails, so does the test, with all that it said."""
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
    return result.stdout


def settings():
    """The section that settings.ini has."""
    parser = configparser.ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


@pytest.fixture
def copy(tmp_path):
    """The project's own files in a folder where a test may write."""
    folder = tmp_path / "project"
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("autowzry_agent", "nbs", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


# Notebooks, modules, docs and README in step


def python_files(folder):
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


def test_the_modules_are_what_the_notebooks_export(copy):
    for path in (copy / "autowzry_agent").glob("*.py"):
        path.unlink()
    run(script("nbdev_export"), cwd=copy)
    assert python_files(copy / "autowzry_agent") == python_files(PACKAGE), "mend it with: nbdev_export"


def test_the_notebooks_are_clean():
    run(sys.executable, "tools/notebooks.py", "check")


def test_nbdev_clean_leaves_the_notebooks_as_they_are(copy):
    before = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "nbs").glob("*.ipynb")}
    run(script("nbdev_clean"), cwd=copy)
    assert {path.name: path.read_text(encoding="utf-8") for path in (copy / "nbs").glob("*.ipynb")} == before


def test_the_readme_is_what_the_index_makes():
    run(sys.executable, "tools/readme.py", "--check")


def test_the_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)\s#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_docs_build_and_their_links_lead_somewhere():
    pytest.importorskip("smalldocs", reason="smalldocs needs Python 3.11")
    run(sys.executable, "tools/docs.py", "--check")


def test_the_site_goes_where_the_settings_say():
    project = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))["project"]
    assert project["output-dir"] == settings()["doc_path"]
    linked = ROOT / "nbs" / "_quarto.yml"
    # a clone without symbolic links holds the link's target as text
    assert linked.resolve() == ROOT / "_quarto.yml" or linked.read_text(encoding="utf-8") == "../_quarto.yml"


# The tool that runs and checks notebooks


def cell(kind, name, source, **more):
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": name, "metadata": {}, "source": source, **code, **more}


def write_notebook(path, *cells, **metadata):
    opening = cell("markdown", "title", "# Toy\n\n> A toy.")
    nb = {"cells": [opening, *cells], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(nb), encoding="utf-8")


def checked(path):
    """What the tool finds wrong with a notebook."""
    result = subprocess.run([sys.executable, "tools/notebooks.py", "check", path], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8")
    return result.returncode, result.stdout


def test_running_a_notebook_makes_it_clean(tmp_path):
    path = tmp_path / "toy.ipynb"
    kept = {"name": "stdout", "output_type": "stream", "text": "ran last week\n"}
    write_notebook(
        path,
        cell("code", "imports", "import sys\nfrom ipywidgets import IntSlider\nfrom matplotlib import pyplot as plt\nfrom tqdm import tqdm"),
        cell("code", "bar", "for _ in tqdm(range(3)): print('step')\nprint('careful', file=sys.stderr)"),
        cell("code", "widget", "IntSlider()"),
        cell("code", "figure", "plt.plot([1, 2])\nplt.show()", execution_count=7),
        cell("code", "object", "object()"),
        cell("code", "slow", "#| slow\nprint('ran now')", outputs=[kept]),
        cell("code", "never", "#| eval: false\n1 / 0"),
        widgets={"state": {}},
    )
    run(sys.executable, "tools/notebooks.py", "run", path)
    assert checked(path) == (0, "the notebooks are clean\n")
    cells = {c["id"]: c for c in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    shown = {name: [o.get("text") or sorted(o["data"]) for o in c["outputs"]] for name, c in cells.items() if c.get("outputs")}
    assert shown == {
        "bar": [["step\n", "step\n", "step\n"], ["careful\n"]],
        "figure": [["image/png", "text/plain"]],
        "object": [["text/plain"]],
        "slow": [["ran last week\n"]],
    }
    assert cells["object"]["outputs"][0]["data"]["text/plain"] == ["<object>"]
    run(sys.executable, "tools/notebooks.py", "run", "--slow", path)
    assert "ran now" in path.read_text(encoding="utf-8") and "ran last week" not in path.read_text(encoding="utf-8")


def test_a_notebook_that_fails_keeps_its_file(tmp_path):
    path = tmp_path / "toy.ipynb"
    write_notebook(path, cell("code", "wrong", "1 / 0"))
    before = path.read_bytes()
    result = subprocess.run([sys.executable, "tools/notebooks.py", "run", path], cwd=ROOT, stderr=subprocess.PIPE, encoding="utf-8")
    assert result.returncode == 1 and "toy.ipynb, cell wrong: it failed" in result.stderr
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_the_check_names_notebook_cell_and_fault(tmp_path):
    path = tmp_path / "toy.ipynb"
    shows = lambda **data: [{"output_type": "display_data", "metadata": {}, "data": data}]
    write_notebook(
        path,
        cell("markdown", "0a1b2c3d", "Text."),
        cell("markdown", "twice", "Text."),
        cell("markdown", "twice", "Text.", metadata={"tags": ["x"]}),
        cell("code", "ran", "1", execution_count=3),
        cell("code", "failed", "1 / 0", outputs=[{"output_type": "error", "ename": "ZeroDivisionError", "evalue": "", "traceback": []}]),
        cell("code", "view", "1", outputs=shows(**{"application/vnd.jupyter.widget-view+json": {}})),
        cell("code", "path", "1", outputs=shows(**{"text/plain": "saved in /home/me/run"})),
        cell("code", "windows-path", "1", outputs=shows(**{"text/plain": r"saved in C:\Users\me"})),
        cell("code", "long", "#| export\n" + "x = 1\n" * 40),
        cell("code", "mixed", "#| export\nimport os\nhere = os.curdir"),
        cell("code", "mixed-example", "import os\nprint(os.curdir)"),
        widgets={},
    )
    code, said = checked(path)
    assert code == 1
    for fault in (
        "toy.ipynb: metadata 'widgets' is not kept",
        "toy.ipynb: it shows no figure",
        "toy.ipynb: cell 0a1b2c3d: its id is a random one",
        "toy.ipynb: cell twice: another cell has the same id",
        "toy.ipynb: cell twice: metadata ['tags'] is not kept",
        "toy.ipynb: cell ran: it has an execution count",
        "toy.ipynb: cell failed: its saved output is an error: ZeroDivisionError",
        "toy.ipynb: cell view: an output is a widget",
        "toy.ipynb: cell path: a path of a machine is in its output: /home/me/run",
        "toy.ipynb: cell windows-path: a path of a machine is in its output",
        "toy.ipynb: cell long: an exported cell of 41 lines; 40 are allowed",
        "toy.ipynb: cell mixed: imports and other code in one cell",
        "toy.ipynb: cell mixed-example: imports and other code in one cell",
    ):
        assert fault in said


# What imports what


def imports(module):
    """The project's own modules and the other packages that a module imports, inside functions too."""
    own, others = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(filter(None, ["autowzry_agent" if node.level else "", node.module]))
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first != "autowzry_agent":
                others.add(first)
            elif rest and rest[0] in MAY_IMPORT:
                own.add(rest[0])
    return own, others


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_those_above_it(module):
    own, others = imports(module)
    assert own <= MAY_IMPORT[module]
    assert module not in WITHOUT_FIGURES or not others & FOR_FIGURES


def test_training_needs_no_figures():
    wanted = ", ".join(f"autowzry_agent.{name}" for name in WITHOUT_FIGURES)
    printed = run(sys.executable, "-c", f"import sys, {wanted}; print(sorted({FOR_FIGURES} & sys.modules.keys()))")
    assert printed == "[]\n"


def test_every_module_imports_without_a_warning():
    wanted = ", ".join(f"autowzry_agent.{name}" for name in MODULES)
    assert run(sys.executable, *STRICT, "-c", f"import {wanted}") == ""


# Every text is UTF-8, and says so

BINARY_OPENERS = {"Image", "os", "zipfile"}


def sources():
    """All Python that is ours: files and the code of notebooks, by name."""
    for folder in ("autowzry_agent", "tools", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "nbs").glob("*.ipynb")):
        for found in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if found["cell_type"] == "code":
                source = "".join(found["source"])
                yield f"{path.name}, cell {found['id']}", re.sub(r"^\s*[%!].*", "", source, flags=re.M)


def opens_text_unsaid(call):
    """Whether a call reads or writes text in the machine's own encoding."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in named or None in named:
        return False
    if any(getattr(named.get(key), "value", False) is True for key in ("text", "universal_newlines")):
        return True
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("read_text", "write_text"):
        return True
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name != "open" or owner in BINARY_OPENERS:
        return False
    mode = named.get("mode", (call.args[isinstance(call.func, ast.Name) :] or [None])[0])
    return "b" not in str(getattr(mode, "value", ""))


def test_text_is_opened_with_its_encoding_said():
    calls = [(name, node) for name, source in sources() for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert [f"{name}, line {call.lineno}" for name, call in calls if opens_text_unsaid(call)] == []


# What ships


def test_the_versions_agree():
    version = settings()["version"]
    assert f'__version__ = "{version}"' in (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[([\d.]+)\]", changelog, re.M)[1] == version


def test_the_wheel_holds_the_package_and_nothing_else(copy, tmp_path):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, copy, cwd=tmp_path)  # the wheel is made of the sdist
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        commands = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        about = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    info = f"autowzry_agent-{settings()['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"autowzry_agent", info}
    held = {name.removeprefix("autowzry_agent/") for name in names if name.startswith("autowzry_agent/")}
    assert held == {path.name for path in PACKAGE.glob("*.py")} | SHIPPED_SETTINGS
    assert set(re.findall(r"^(\w+)\s*=\s*autowzry_agent\.cli:\1$", commands, re.M)) == COMMANDS
    assert "License-Expression: Apache-2.0" in about and "Requires-Python: >=3.10" in about


def test_the_package_runs_on_fastcore_2(tmp_path):
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, "fastcore>=2"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    if fetched.returncode and "CI" not in os.environ:
        pytest.skip(f"pip cannot fetch fastcore 2 here: {fetched.stdout.strip().splitlines()[-1]}")
    assert fetched.returncode == 0, fetched.stdout
    wanted = ", ".join(f"autowzry_agent.{name}" for name in MODULES)
    assert run(sys.executable, "-c", f"import fastcore, {wanted}; print(fastcore.__version__)", PYTHONPATH=str(tmp_path)).startswith("2.")
    assert "usage: autowzry_train" in run(script("autowzry_train"), "--help", PYTHONPATH=str(tmp_path))


# What continuous integration runs


def test_continuous_integration_finds_its_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert readme.count("python -m venv .venv && .venv/bin/pip install -e . && .venv/bin/autowzry_train") == 1
    assert readme.count('python -m venv .venv && .venv/bin/pip install -e ".[dev]" && .venv/bin/nbdev_test && .venv/bin/pytest') == 1
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert {job["runs-on"] for job in workflow["jobs"].values()} == {"ubuntu-latest", "windows-latest"}

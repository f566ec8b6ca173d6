"""Run the notebooks, or check that they are fit to commit.

    python tools/notebooks.py run [--slow] [NB ...]    fill in the outputs with a real kernel
    python tools/notebooks.py check [NB ...]           exit 1, naming notebook and cell, when one is not clean

Without names: every notebook of nbs/. `run` skips the cells that `nbdev_test` skips (`#| eval: false` and the
flags that settings.ini names) and keeps their committed outputs; --slow runs the slow ones as well.
"""
import argparse
import ast
import copy
import json
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.config import get_config
from nbdev.process import extract_directives

ROOT = Path(__file__).resolve().parent.parent
METADATA = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
FIGURES = {"image/png", "image/jpeg", "image/svg+xml"}
MAX_EXPORTED_LINES = 40

PROGRESS_BAR = re.compile(r"\d+%\|.*\| *\d|\d+it \[\d|(it/s|s/it)\]")
ADDRESS = re.compile(r"(<.*?)( at 0x[0-9a-fA-F]+)(>)")
RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){0,3}(-[0-9a-f]{12})?")
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:tmp|home|root|Users|var/folders)/\w|\b[A-Za-z]:\\+Users\b")


# Reading and writing


def notebooks(names):
    """The notebooks with these file names, or all of nbs/."""
    found = [Path(n) for n in names] or sorted((ROOT / "nbs").glob("[!_.]*.ipynb"))
    if not found:
        sys.exit(f"no notebooks in {ROOT / 'nbs'}")
    return found


def joined(text):
    """Text that a notebook may store as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


def lines(text):
    """Text as a notebook stores it: a list of lines, so that a diff shows the changed one."""
    return joined(text).splitlines(keepends=True)


def as_text(nb):
    """The one text form of a notebook, which `nbdev_clean` leaves as it is."""
    return json.dumps(nb, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def write(path, text):
    """Replace a file so that a reader finds the old text or the new one, never a part."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(beside, path)


# The form that is committed


def tidy(nb):
    """The notebook with nothing in it that differs from run to run or from machine to machine."""
    cells = [tidy_cell(cell) for cell in nb["cells"]]
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def tidy_cell(cell):
    """A cell with its source and outputs, and no metadata."""
    kept = {key: cell[key] for key in ("attachments", "cell_type", "id") if key in cell}
    kept |= {"metadata": {}, "source": lines(cell["source"])}
    if cell["cell_type"] == "code":
        kept |= {"execution_count": None, "outputs": tidy_outputs(cell["outputs"])}
    return kept


def tidy_outputs(outputs):
    """Outputs without widgets, progress bars, counts and addresses; streams in one piece."""
    kept = []
    for output in outputs:
        output = copy.deepcopy(dict(output))
        if output["output_type"] == "stream":
            text = joined(output["text"])
            if kept and kept[-1]["output_type"] == "stream" and kept[-1]["name"] == output["name"]:
                text = joined(kept.pop()["text"]) + text
            output["text"] = text
        elif "data" in output:
            if WIDGET_VIEW in output["data"]:
                continue
            output["data"] = {mime: tidy_data(mime, value) for mime, value in output["data"].items()}
            if "execution_count" in output:
                output["execution_count"] = None
        kept.append(output)
    for output in kept:
        if output["output_type"] == "stream":
            text = ADDRESS.sub(r"\1\3", output["text"])
            output["text"] = lines(text if output["name"] == "stdout" else without_progress_bars(text))
    return [output for output in kept if output["output_type"] != "stream" or output["text"]]


def tidy_data(mime, value):
    """One form of an output: text as lines, a picture as one string."""
    if mime.startswith("text/"):
        return lines(ADDRESS.sub(r"\1\3", joined(value)))
    if mime == "image/svg+xml":
        return lines(value)
    return joined(value).strip() if mime.startswith("image/") else value


def without_progress_bars(text):
    """Text of stderr without what tqdm drew over itself, and without empty lines, which it leaves as well."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip() and not PROGRESS_BAR.search(line))


# Running


def is_skipped(cell, slow):
    """Whether `nbdev_test` would not run this cell; with `slow`, the slow ones do run."""
    if "nbdev_export(" in cell.source:
        return True
    directives = extract_directives(cell, remove=False)
    flags = set(get_config(path=ROOT).tst_flags.split()) - ({"slow"} if slow else set())
    return directives.get("eval:", [""])[0].lower() == "false" or bool(flags & directives.keys())


class Runner(NotebookClient):
    """A notebook client that leaves the skipped cells and their outputs alone."""

    slow = False

    async def async_execute_cell(self, cell, cell_index, **kwargs):
        if cell.cell_type == "code" and is_skipped(cell, self.slow):
            return cell
        self.running = cell.id
        return await super().async_execute_cell(cell, cell_index, **kwargs)


def run(path, slow=False):
    """Run one notebook in its folder and write it with its outputs; on an error the file stays as it was."""
    nb = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    runner = Runner(nb, resources=folder, kernel_name="python3", timeout=None, record_timing=False, store_widget_state=False)
    runner.slow = slow
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        runner.execute(env={**os.environ, "PYTHONPATH": python_path, "MPLBACKEND": "inline"})
    except CellExecutionError as error:
        sys.exit(f"{path.name}, cell {runner.running}: it failed; the file stays as it was\n{error}")
    write(path, as_text(tidy(nb)))


# Checking


def check(path):
    """What keeps a notebook from being committed: a list of sentences that name the cell."""
    text = path.read_text(encoding="utf-8")
    nb = json.loads(text)
    found = [f"metadata {key!r} is not kept" for key in nb["metadata"] if key not in METADATA]
    if "widgets" in nb["metadata"]:
        found.append("it carries widget state, whose ids are random")
    if not any(FIGURES & output.get("data", {}).keys() for cell in nb["cells"] for output in cell.get("outputs", [])) and path.stem != "index":
        found.append("it shows no figure")
    seen = set()
    for number, cell in enumerate(nb["cells"]):
        name = cell.get("id") or f"number {number}"
        problems = id_problems(cell, seen) + (opening_problems(cell) if number == 0 else [])
        if cell["metadata"]:
            problems.append(f"metadata {sorted(cell['metadata'])} is not kept")
        if cell["cell_type"] == "code":
            problems += output_problems(cell) + code_problems(joined(cell["source"]))
        found += [f"cell {name}: {problem}" for problem in problems]
    if not found and text != as_text(tidy(nb)):
        found.append("it is not in the form that is committed; mend it with: python tools/notebooks.py run")
    return found


def id_problems(cell, seen):
    """A cell's id names it in the module that it is exported to, so it has to be a name that stays."""
    name = cell.get("id")
    repeated = name in seen
    seen.add(name)
    if not name:
        return ["it has no id"]
    if repeated:
        return ["another cell has the same id"]
    return ["its id is a random one; give it a name"] if RANDOM_ID.fullmatch(name) else []


def opening_problems(cell):
    """nbdev makes the page's title and description of the first cell and drops whatever else is in it."""
    parts = [line for line in joined(cell["source"]).splitlines() if line.strip()]
    if cell["cell_type"] != "markdown" or len(parts) < 2 or not parts[0].startswith("# ") or not parts[1].startswith("> "):
        return ["the first cell has to be a title (`# ...`) and one line that says what it is for (`> ...`)"]
    return ["the docs drop what follows the `> ` line in the first cell; move it to a cell of its own"] if len(parts) > 2 else []


def output_problems(cell):
    """What an output must not carry."""
    problems = ["it has an execution count"] if cell["execution_count"] is not None else []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if output["output_type"] == "error":
            problems.append(f"its saved output is an error: {output['ename']}")
        if output.get("execution_count") is not None:
            problems.append("an output has an execution count")
        if WIDGET_VIEW in data:
            problems.append("an output is a widget, which a saved page cannot show")
        texts = [joined(value) for mime, value in data.items() if mime.startswith("text/") or mime == "image/svg+xml"]
        for text in [*texts, joined(output.get("text", "")), *output.get("traceback", [])]:
            place = MACHINE_PATH.search(text)
            if place or str(ROOT) in text:
                problems.append(f"a path of a machine is in its output: {text[place.start() :][:40] if place else ROOT}")
    return problems


def code_problems(source):
    """What nbdev needs of a code cell: short exports, and imports in cells of their own."""
    exported = re.search(r"^#\|\s*export[si]?\b", source, re.M)
    problems = []
    length = sum(bool(line.strip()) for line in source.splitlines())
    if exported and length > MAX_EXPORTED_LINES:
        problems.append(f"an exported cell of {length} lines; {MAX_EXPORTED_LINES} are allowed")
    if "nbdev_export(" in source or re.search(r"^\s*[%!]", source, re.M):
        return problems
    tree = ast.parse(source)
    if exported:
        imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body]
        mixed = any(imports) and not all(imports)
    else:
        kinds = {type(node) for node in ast.walk(tree)}
        mixed = kinds & {ast.Import, ast.ImportFrom} and kinds & {ast.Expr, ast.Assign}
    if mixed:
        problems.append("imports and other code in one cell; nbdev runs every cell with an import when it builds the docs")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name, help in (("run", "fill in the outputs"), ("check", "exit 1 when a notebook is not clean")):
        action = actions.add_parser(name, help=help)
        action.add_argument("names", nargs="*", metavar="NB", help="notebooks; all of nbs/ when none is named")
    actions.choices["run"].add_argument("--slow", action="store_true", help="run the cells marked `#| slow` as well")
    args = parser.parse_args()
    paths = notebooks(args.names)
    if args.action == "run":
        for path in paths:
            start = time.perf_counter()
            run(path.resolve(), args.slow)
            print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)
        return
    found = [f"{path.name}: {problem}" for path in paths for problem in check(path)]
    print("\n".join(found) or "the notebooks are clean")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

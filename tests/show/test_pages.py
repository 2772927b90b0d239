"""`ckpt/pictures/pages.py`, `ckpt/commands/inspect/inspection.py`, `ckpt/commands/drawings.py`: pages in a browser."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import shutil
import time
import zlib
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt.commands.inspect.inspecting import Inspection
from ckpt.commands.inspect.sketch import Sketcher
from ckpt.plan.checkpoint import WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Tensor, Whole
from tests.show import browser as browsers
from tests.show import large_runs
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES, REPOSITORY

#: With CKPT_GOLDEN=write in the environment, tests redraw the pictures in docs/pages.md.
PICTURES = REPOSITORY / "docs"
HOSTILE = "</script><img src=x onerror=window.hacked=1>"
LARGE = {"zero3": large_runs.zero3, "fsdp2": large_runs.fsdp2}


def content(page: str) -> dict[str, Any]:
    """Return the data in a page."""
    packed = re.search(r'id="data">([A-Za-z0-9+/=]+)</script>', page)
    assert packed is not None
    found: dict[str, Any] = json.loads(zlib.decompress(b64decode(packed[1])))
    return found


def damaged() -> Checkpoint:
    """Make two ranks with a tensor with a hole, one with an overlap, and one replicated."""

    def held(shape: tuple[int, ...], *boxes: Box) -> Pieces:
        every = enumerate(boxes)
        return Pieces(tuple(Fragment(b, Extent.contiguous(f"r{r}", 0, FLOAT32, b.sizes), r) for r, b in every))

    shape, top, bottom = (8, 4), Box((0, 0), (4, 4)), Box((4, 0), (4, 4))
    sources = {
        "layers.0.whole.weight": held(shape, top, bottom),
        "layers.0.hole.weight": held(shape, top, Box((5, 0), (3, 4))),
        "layers.0.twice.weight": held(shape, Box((0, 0), (6, 4)), bottom),
    }
    tensors = {(fqn, WEIGHT): Tensor(fqn, WEIGHT, FLOAT32, shape, one) for fqn, one in sources.items()}
    copies = [Whole(Extent.contiguous(f"r{rank}", 64, FLOAT32, (4,)), rank) for rank in range(2)]
    tensors["norm.weight", WEIGHT] = Tensor("norm.weight", WEIGHT, FLOAT32, (4,), copies[0], replicas=(copies[1],))
    return Checkpoint("/runs/small/step4", "dcp", tensors, (), world_size=2)


def tuned(folder: Path) -> tuple[Path, Path]:
    """Make a 24-layer model and its tuned copy: later layers changed more, norms did not, one element is NaN."""
    random, base, after = np.random.default_rng(0), {}, {}
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.o_proj": (64, 64), "mlp.up_proj": (96, 64), "norm": (64,)}
    for layer in range(24):
        for name, shape in shapes.items():
            values = random.standard_normal(shape).astype("f4")
            change = 0 if name == "norm" else random.standard_normal(shape).astype("f4") * 10 ** (layer / 6 - 5)
            base[f"model.layers.{layer}.{name}.weight"] = values
            after[f"model.layers.{layer}.{name}.weight"] = (values + change).astype("f4")
    after["model.layers.7.self_attn.q_proj.weight"][3, 4] = np.nan
    base["lm_head.weight"] = after["lm_head.weight"] = random.standard_normal((100, 64)).astype("f4")
    base["only.weight"] = np.ones(3, "f4")
    places = folder / "base", folder / "tuned"
    for place, tensors in zip(places, (base, after), strict=True):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        save_file(tensors, place / "model.safetensors")
    return places


# -- file content ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["toy-zero2", "moe-zero3", "dcp-fsdp2", "megatron-fsdp", "verl-fsdp1", "toy-zero1"])
def test_every_tensor_is_in_it_with_all_of_its_bytes(name: str) -> None:
    checkpoint = ckpt.open(FIXTURES / name)
    page, _ = ckpt.inspect(checkpoint).page()
    found = content(page)
    rows = [*zip(*found["tensors"], strict=True)]
    seen = {
        (found["names"][n], found["roles"][r]): (found["dtypes"][d][0], tuple(found["shapes"][s]))
        for n, r, d, s, _ in rows
    }
    assert seen == {key: (one.dtype.name, one.shape) for key, one in checkpoint.tensors.items()}
    by_rank: Counter[Any] = Counter()
    for one in checkpoint.tensors.values():
        for source in (one.source, *one.replicas):
            for fragment in source.fragments(one.shape):
                by_rank[fragment.rank] += fragment.extent.nbytes
    if None not in by_rank:
        assert {rank: sum(kinds.values()) for rank, kinds, _ in found["holders"]} == by_rank
    for (fqn, role), look in zip(checkpoint.tensors, (found["looks"][row[4]] for row in rows), strict=True):
        runs = look[1]
        ranks = {found["holders"][n][0] for a, b in zip(runs[::2], runs[1::2], strict=True) for n in range(a, b + 1)}
        tensor = checkpoint.tensors[fqn, role]
        held = {part.rank for source in (tensor.source, *tensor.replicas) for part in source.fragments(tensor.shape)}
        assert ranks == held or None in held or not tensor.numel


def test_what_is_damaged_is_in_it(tmp_path: Path) -> None:
    page, wrong = Inspection(damaged()).page()
    found = content(page)
    faults = {found["names"][n]: found["looks"][look][4] for n, _, _, _, look in zip(*found["tensors"], strict=True)}
    assert faults["layers.0.hole.weight"] == ["hole at elements 16:20"]
    assert faults["layers.0.twice.weight"] == ["overlap at elements 16:24"]
    assert faults["layers.0.whole.weight"] == faults["norm.weight"] == []
    assert {one.fqn for one in wrong} == {"layers.0.hole.weight", "layers.0.twice.weight"}


def test_a_checkpoint_with_a_hole_has_a_page_and_the_exit_code_of_damage(tmp_path: Path) -> None:
    step = shutil.copytree(FIXTURES / "dcp-fsdp2/step-2", tmp_path / "step-2")
    metadata = pickle.loads((step / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.down.weight"].chunks.pop()
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    done = run_ckpt("inspect", step, "--html", tmp_path / "out.html")
    assert done.code == 4 and f"hint: see the red parts in {tmp_path / 'out.html'}" in done.err
    found = content((tmp_path / "out.html").read_text())
    assert [look[4] for look in found["looks"] if look[4]] == [["hole at elements 9:15"]]


def test_the_steps_of_a_run_and_all_that_inspect_prints_are_in_it(tmp_path: Path) -> None:
    run = FIXTURES / "trainer-zero2"
    inspection = ckpt.inspect(run)
    found = content(inspection.page()[0])
    assert found["steps"] == [
        ["checkpoint", "format", "step", "size", "state"],
        *(list(one.row()) for one in inspection.run),
    ]
    assert len(found["steps"]) == 3
    for name, text in found["facts"]:
        assert f"{name} " in str(inspection) and text in str(inspection)


@pytest.fixture(scope="module", params=LARGE)
def large(request: pytest.FixtureRequest) -> Checkpoint:
    return LARGE[request.param]()


def test_a_hundred_thousand_tensors_on_512_ranks(large: Checkpoint) -> None:
    assert len(large.tensors) > 99_000
    begin = time.process_time()
    page, _ = Inspection(large).page()
    assert time.process_time() - begin < 6  # includes collecting earlier tests' garbage
    assert len(page) < 5_000_000
    found = content(page)
    assert len(found["tensors"][0]) == len(large.tensors) and len(found["holders"]) == 512
    total = sum(one.nbytes for one in large.tensors.values())
    assert sum(sum(kinds.values()) for _, kinds, _ in found["holders"]) == total


def test_tensors_that_are_cut_alike_are_sketched_as_if_each_were_listed(large: Checkpoint) -> None:
    """The rules group equal layouts; a sketch with every fragment must agree."""

    class Listed:
        def __init__(self, source: Any) -> None:
            self.fragments, self.source = source.fragments, source
            if hasattr(source, "padding"):
                self.padding = source.padding

    every = [*large.tensors.values()]
    tensors = every[:40] + every[-8:]
    by_cut, by_list = (Sketcher(lambda fragment: fragment.rank or 0) for _ in range(2))
    for tensor in tensors:
        plain = tensor._replace(source=Listed(tensor.source))
        assert by_cut.sketch(tensor, None) == by_list.sketch(plain, None), tensor.fqn
    assert by_cut.by_role == by_list.by_role


def test_nothing_of_a_name_is_markup_and_nothing_is_loaded() -> None:
    checkpoint = damaged()
    tensor = checkpoint.tensors["norm.weight", WEIGHT]._replace(fqn=HOSTILE)
    hostile = replace(checkpoint, path=f"/runs/{HOSTILE}", tensors={tensor.key: tensor})
    page, _ = Inspection(hostile).page()
    assert "<img" not in page and page.count("</script>") == 2 and page.count("<script") == 2
    assert content(page)["names"] == [HOSTILE]
    assert "default-src 'none'" in page
    assert not re.search(r"\b(src|href)=|url\(|@import|https?:", page.replace(escape(HOSTILE), ""))


def test_the_table_has_a_row_for_each_tensor() -> None:
    checkpoint = ckpt.open(FIXTURES / "dcp-fsdp2")
    printed = run_ckpt("inspect", FIXTURES / "dcp-fsdp2", "--csv").out
    rows = [*csv.DictReader(io.StringIO(printed))]
    assert {(row["fqn"], row["kind"]) for row in rows} == set(checkpoint.tensors)
    for row in rows:
        tensor = checkpoint.tensors[row["fqn"], row["kind"]]
        assert (row["dtype"], int(row["bytes"])) == (tensor.dtype.name, tensor.nbytes)
        assert tuple(map(int, filter(None, row["shape"].split("x")))) == tensor.shape
        assert set(row["files"].split()) == {os.path.basename(part.extent.path) for part in tensor.fragments()}
        assert set(row["ranks"].split()) == {str(part.rank) for part in tensor.fragments()}
    assert run_ckpt("inspect", FIXTURES / "dcp-fsdp2", "--csv", "--json").code == 2


# -- file place --------------------------------------------------------------------------------------------------------


def test_the_page_of_a_comparison_is_of_two_checkpoints(tmp_path: Path) -> None:
    base, after = tuned(tmp_path)
    page = tmp_path / "out.html"
    for words, said in (
        ((base, after, "--run", "--html", page), "--html needs two checkpoints"),
        ((base, "--html", page), "--html needs two checkpoints"),
        ((base, after, "--overwrite"), "--overwrite goes with --html"),
    ):
        done = run_ckpt("verify", *words)
        assert (done.code, said in done.err, page.exists()) == (2, True, False), done.err
    assert run_ckpt("verify", base, after, "--html", page).code == 1
    by_name = {one["fqn"]: one for one in content(page.read_text())["tensors"]}
    assert by_name["model.layers.7.self_attn.q_proj.weight"]["change"]["not_finite"] == [0, 1]
    assert by_name["only.weight"]["status"] == "-" and "change" not in by_name["lm_head.weight"]
    described = {one.fqn: one.change for one in ckpt.diff(base, after).results}
    name = "model.layers.3.mlp.up_proj.weight"
    assert by_name[name]["change"] == described[name].to_json(), "what differs is measured as `ckpt diff` does"  # type: ignore[union-attr]


# -- in a browser ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser() -> Iterator[browsers.Browser]:
    if lacking := browsers.missing():
        pytest.skip(f"no Chromium with its driver is installed: there is no {lacking}")
    with browsers.opened() as found:
        yield found


def shown(browser: browsers.Browser, page: str, folder: Path) -> int:
    """Open a page and return the milliseconds until it is usable."""
    path = folder / "page.html"
    path.write_text(page)
    browser.open(path)
    ready = int(browser.wait("document.documentElement.dataset.ready"))
    assert browser.log() == []
    return ready


def names(browser: browsers.Browser) -> list[str]:
    """Return the names in the list's visible rows."""
    found: list[str] = browser.script(
        "return [...document.querySelectorAll('.row:not([hidden])')].map((row) => row.children[0].textContent)"
    )
    return found


def test_a_large_run_is_searched_and_zoomed(browser: browsers.Browser, tmp_path: Path) -> None:
    page, _ = Inspection(large_runs.zero3()).page()
    assert any(shown(browser, page, tmp_path) < 1000 for _ in range(5)), (
        "where others use the processors, not each time"
    )
    assert "99,808 of 99,808 tensors" in browser.script("return document.querySelector('#count').textContent")
    assert 10 < len(names(browser)) < 40, "rows that cannot be seen are not there"
    seconds = browser.script(
        "const begin = performance.now(), box = document.querySelector('#search');"
        "box.value = 'layers.17. experts.3. role:exp_avg_sq'; box.dispatchEvent(new Event('input'));"
        "return new Promise((done) => setTimeout(() => done((performance.now() - begin - 100) / 1000), 100));"
    )
    assert seconds < 1
    browser.wait("document.querySelector('#count').textContent.startsWith('3 of')")
    assert names(browser) == [f"model.layers.17.mlp.experts.3.{one}_proj.weight" for one in ("gate", "up", "down")]
    browser.click(".row")
    card = browser.script("return document.querySelector('#card').textContent")
    assert "model.layers.17.mlp.experts.3.gate_proj.weight" in card and "ranks0-511" in card
    browser.type("#search", "rank:511")
    browser.wait("document.querySelector('#count').textContent.startsWith('99,808 of')")
    browser.type("#search", "nothing.like.this")
    browser.wait("document.querySelector('#count').textContent.startsWith('0 of')")
    browser.type("#search", " ")
    browser.wait("document.querySelector('#count').textContent.startsWith('99,808 of')")
    browser.point("#map", 0.01, 0.01, click=True)
    browser.wait("document.querySelectorAll('#crumbs button').length == 2")
    assert "all tensorsmodel" in browser.script("return document.querySelector('#crumbs').textContent")
    browser.script("document.querySelector('.rows').scrollTop = 1e6")
    browser.wait("document.querySelector('.row.on') === null && document.querySelectorAll('.row').length < 60")
    assert browser.log() == []


def test_what_is_damaged_and_what_is_unusual_is_found(browser: browsers.Browser, tmp_path: Path) -> None:
    checkpoint, odd = damaged(), "blocks.5.weight"
    many = {
        (fqn, WEIGHT): Tensor(fqn, WEIGHT, FLOAT32, shape, Whole(Extent.contiguous("r0", 0, FLOAT32, shape), 0))
        for fqn, shape in ((f"blocks.{n}.weight", (4, 4 + (n == 5))) for n in range(12))
    }
    page, _ = Inspection(replace(checkpoint, tensors={**checkpoint.tensors, **many})).page()
    shown(browser, page, tmp_path)
    badges = browser.script("return [...document.querySelectorAll('#badges > *')].map((one) => one.textContent)")
    assert badges == ["2 tensors damaged", "1 tensor in several copies", "3 tensors unusual"]
    browser.click("#badges button")
    browser.wait("document.querySelector('#count').textContent.startsWith('2 of')")
    browser.click(".row")
    browser.wait("document.querySelector('#card').textContent.includes('hole at elements 16:20')")
    browser.click("#badges button")
    browser.click("#odd")
    browser.wait("document.querySelector('#count').textContent.startsWith('3 of')")
    assert odd in names(browser)
    browser.type("#search", "blocks")
    browser.wait("document.querySelector('#count').textContent.startsWith('1 of')")
    browser.click(".row")
    assert "another shape than 11 of its 12 siblings" in browser.script(
        "return document.querySelector('#card').innerText"
    )
    browser.click("#odd")
    browser.type("#search", "rank:1")
    browser.wait("document.querySelector('#count').textContent.startsWith('4 of')")
    assert browser.log() == []


def test_a_hostile_name_is_shown_and_does_nothing(browser: browsers.Browser, tmp_path: Path) -> None:
    base, _ = tuned(tmp_path)
    save_file({HOSTILE: np.ones(3, "f4"), "__proto__.x": np.ones(2, "f4")}, base / "model.safetensors")
    (tmp_path / "other").mkdir()
    shutil.copytree(base, tmp_path / "other", dirs_exist_ok=True)
    save_file({HOSTILE: np.zeros(3, "f4"), "__proto__.x": np.ones(2, "f4")}, tmp_path / "other/model.safetensors")
    assert run_ckpt("inspect", base, "--html", tmp_path / "a.html").code == 0
    assert run_ckpt("verify", base, tmp_path / "other", "--html", tmp_path / "b.html").code == 1
    for name in ("a.html", "b.html"):
        shown(browser, (tmp_path / name).read_text(), tmp_path)
        assert HOSTILE in names(browser)
        browser.click(".row")
        browser.point("#map", 0.3, 0.5)
        assert browser.script("return [window.hacked, document.images.length]") == [None, 0]
        refused = browser.script(
            "const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
            "document.body.append(one); return window.ran"
        )
        assert refused is None, "the page's policy lets no other script run"
        assert any("Content Security Policy" in line for line in browser.log())


def test_a_change_that_is_larger_than_any_number(browser: browsers.Browser, tmp_path: Path) -> None:
    """Two finite elements can be infinitely far apart: the tensor comes first, in the ramp's last colour."""
    for name, big in (("a", -1e308), ("b", 1e308)):
        (tmp_path / name).mkdir()
        tensors = {f"model.layers.{n}.w": np.full(3, big if n == 1 else 1.0 + (name == "b"), "f8") for n in range(3)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert run_ckpt("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "heat.html").code == 0
    shown(browser, (tmp_path / "heat.html").read_text(), tmp_path)
    browser.script(
        "const by = document.querySelector('#by'); by.value = 'largest change'; by.onchange?.();"
        "by.dispatchEvent(new Event('change', {bubbles: true})); by.dispatchEvent(new Event('input'))"
    )
    assert names(browser)[0] == "model.layers.1.w"
    row = browser.script("return document.querySelector('.row').textContent")
    assert "inf" in row and "NaN" not in row
    colour = browser.script(
        "const map = document.querySelector('#map'), pen = map.getContext('2d');"
        "return [...pen.getImageData(150 + 40, 150 + 18 + 8, 1, 1).data].slice(0, 3)"
    )
    assert colour == [250, 230, 60]


def test_the_heat_map_shows_where_it_changed(browser: browsers.Browser, tmp_path: Path) -> None:
    base, after = tuned(tmp_path)
    assert run_ckpt("diff", base, after, "--html", tmp_path / "heat.html").code == 0
    shown(browser, (tmp_path / "heat.html").read_text(), tmp_path)
    badges = browser.script("return [...document.querySelectorAll('#badges > *')].map((one) => one.textContent)")
    assert badges == ["25 equal", "72 different", "1 only in A", "1 tensor with NaN or infinity"]
    first = names(browser)
    assert first[0] == "model.layers.7.self_attn.q_proj.weight", "what is no number comes first"
    assert first[1] == "only.weight" and first[2].startswith("model.layers.23.")
    colours = browser.script(
        "const map = document.querySelector('#map'), pen = map.getContext('2d');"
        "const at = (x, y) => [...pen.getImageData(x, y, 1, 1).data].slice(0, 3).join();"
        "return [0, 7, 23].map((row) => [0, 1, 2, 3].map((column) => at(150 + column * 90 + 40, 150 + row * 18 + 8)))"
    )
    assert colours[0][0] == colours[0][2] != colours[2][0] == colours[2][2], (
        "the last layer changed more than the first"
    )
    assert colours[0][1] == colours[2][1] != colours[0][0], "norms did not change"
    assert "255,43,214" in colours[1], "NaN has a colour of its own"
    browser.point("#map", 0.2, 0.5)
    tip = browser.wait("!document.querySelector('#tip').hidden && document.querySelector('#tip').textContent")
    assert "model.layers." in tip and "relative error" in tip
    browser.click("#odd")
    browser.wait("document.querySelector('#count').textContent.startsWith('73 tensors')")
    assert browser.log() == []


def test_the_pictures_of_the_documentation(browser: browsers.Browser, tmp_path: Path) -> None:
    """Take a screenshot for each page in docs/pages.md."""
    browser.size(1400, 1300)
    shown(browser, Inspection(large_runs.zero3()).page()[0], tmp_path)
    browser.type("#search", "layers.17")
    browser.wait("document.querySelector('#count').textContent.startsWith('1,636 of')")
    browser.click(".row:nth-child(9)")
    browser.screenshot(tmp_path / "pages-inspect.png")
    run_ckpt("diff", *tuned(tmp_path), "--html", tmp_path / "heat.html")
    shown(browser, (tmp_path / "heat.html").read_text(), tmp_path)
    browser.screenshot(tmp_path / "pages-heat.png")
    for name in ("pages-inspect.png", "pages-heat.png"):
        found = (tmp_path / name).read_bytes()
        assert found.startswith(b"\x89PNG") and len(found) > 20_000
        if os.environ.get("CKPT_GOLDEN") == "write":
            (PICTURES / name).write_bytes(found)
        assert name in (PICTURES / "pages.md").read_text() and (PICTURES / name).is_file()

"""Head of a picture: facts, bytes by part and by holder, and the legend."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt.base.text import one_line, pluralize, show_size
from ckpt.commands.inspect.overview import coordinates, mesh, mesh_text, ranks_text
from ckpt.commands.inspect.rows import Picture, Row
from ckpt.commands.inspect.sketch import Holder, Patch, holder_text
from ckpt.pictures.canvas import COLOURS, GAP, GREY, MARGIN, PAPER, RED, SANS, TRACK, Canvas
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint
from ckpt.state.summaries import summary_text

_LISTED = 8
_NAMED = 16  # holders with their own line
_PER_LINE = 32
_COLUMN = 26.0  # maximum column height, without lines for holders
_MAX_MESH = 256  # ranks in a drawn mesh

#: The first match decides the colour in a picture with one file.
PARTS: Mapping[str, str] = {
    "adapters": r"lora_|\.adapter",
    "router": r"\brouter\b|mlp\.gate\.|block_sparse_moe\.gate\.|shared_expert_gate",
    "experts": r"expert",
    "attention": r"attn|attention|\b[qkv]_proj|query_key_value|\bqkv",
    "output": r"lm_head|output_layer|embed_out|^head\b|\.head\b",
    "embeddings": r"embed|\bwte\b|\bwpe\b",
    "MLP": r"mlp|ffn|feed_forward|\bfc\d|dense_h|dense_4h|(gate|up|down)_proj",
    "norms": r"norm|\bln_",
}
OTHER = "other"
PART_COLOURS = dict(zip((*PARTS, OTHER), (COLOURS[i] for i in (3, 7, 1, 0, 4, 2, 5, 6, 14)), strict=True))


def part_of(name: str) -> str:
    # a norm before attention or an MLP is still a norm
    last = ".".join(name.split(".")[-2:])
    if re.search(PARTS["norms"], last):
        return "norms"
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), OTHER)


def part_colour(name: str) -> str:
    return PART_COLOURS[part_of(name)]


def facts(checkpoint: Checkpoint) -> Iterator[str]:
    yield checkpoint.format
    if checkpoint.framework:
        yield checkpoint.framework
    model = (checkpoint.config or {}).get("model_type")
    if isinstance(model, str):
        yield model
    if checkpoint.state.step is not None:
        yield f"step {summary_text(checkpoint.state.step)}"
    if checkpoint.world_size is not None:
        yield f"world size {checkpoint.world_size}"
    yield pluralize(sum(tensor.numel for tensor in checkpoint.parameters.values()), "parameter", ",")


def draw_head(canvas: Canvas, picture: Picture, checkpoint: Checkpoint, title: str, *, by_part: bool) -> None:
    """Colour the model's parts instead of ranks if `by_part`."""
    canvas.line(title, "h", 26)
    canvas.line(" · ".join(one_line(fact, 100) for fact in facts(checkpoint)), "g", 20)
    if words := mesh_text(checkpoint):
        canvas.line(f"mesh: {words}", "b", 19)
    _say_damage(canvas, picture)
    drawn = sum(row.num_tensors for row in picture.rows)
    text = f"{pluralize(drawn, 'tensor', ',')} in {pluralize(len(picture.rows), 'row', ',')}"
    if drawn > len(picture.rows):
        text += ": those that look the same and differ only in role, or in the numbers in their names, are one row"
    canvas.line(text + ".", "g", 18)
    if picture.rows_left_out:
        rest = picture.num_tensors - drawn
        canvas.line(
            f"Not drawn: {pluralize(rest, 'tensor', ',')} in {pluralize(picture.rows_left_out, 'further row')}.",
            "b r",
            18,
        )
    canvas.y += 10
    _draw_parts(canvas, picture.rows, by_part=by_part)
    holders = list(picture.holders)
    if len(holders) <= _NAMED:
        _draw_named(canvas, picture, checkpoint, by_part=by_part)
    else:
        _draw_numbered(canvas, picture)
    _draw_mesh(canvas, picture, checkpoint)
    _draw_kinds(canvas, picture)


def _say_damage(canvas: Canvas, picture: Picture) -> None:
    if not picture.damaged:
        canvas.line("No holes and no overlaps: every element of every tensor drawn here is stored.", "b", 19)
        return
    canvas.line(f"Damaged: {pluralize(len(picture.damaged), 'tensor', ',')} not stored exactly once", "b r", 19)
    for damage in picture.damaged[:_LISTED]:
        more = f" and {len(damage.faults) - 2} more" if len(damage.faults) > 2 else ""
        what = f"{one_line(damage.fqn, 90)} ({one_line(damage.role, 30)}): " + "; ".join(damage.faults[:2]) + more
        canvas.line(what, "n r", 18)
    if len(picture.damaged) > _LISTED:
        canvas.line(f"and {len(picture.damaged) - _LISTED} more", "r", 18)


def _draw_parts(canvas: Canvas, rows: Sequence[Row], *, by_part: bool) -> None:
    """Draw all bytes by kind of module, in greys if colours mean ranks."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[part_of(row.name)] += row.nbytes
    total = sum(sizes.values())
    if not total:
        return
    canvas.say(MARGIN, canvas.y + 15, f"{show_size(total)} in tensors, by model part", "g")
    x = canvas.bar
    for number, (part, nbytes) in enumerate(sizes.most_common()):
        width = canvas.length * nbytes / total
        fill = PART_COLOURS[part] if by_part else ("#8a8a8a", "#bdbdbd")[number % 2]
        said = f"{part}: {show_size(nbytes)}, {nbytes / total:.1%}"
        canvas.rect(x, canvas.y, width, 22, fill, said)
        text = f"{part} {nbytes / total:.0%}"
        canvas.label_in(x + width / 2, canvas.y + 11, text, [fill], width - 4, 22)
        x += width
    canvas.y += 30
    if by_part:
        x = canvas.bar
        for part, nbytes in sizes.most_common():
            text = f"{part} {show_size(nbytes)}"
            if x + 20 + len(text) * SANS > canvas.width - MARGIN:
                x, canvas.y = canvas.bar, canvas.y + 19
            canvas.rect(x, canvas.y + 1, 14, 12, PART_COLOURS[part], "")
            canvas.say(x + 20, canvas.y + 12, text, "g")
            x += len(text) * SANS + 40
        canvas.y += 24


def by_kind(roles: Mapping[str, int]) -> list[tuple[str, int]]:
    kinds: dict[str, int] = dict.fromkeys(("weights", "masters", "optimizer states", "buffers"), 0)
    names = {WEIGHT: "weights", MASTER: "masters", BUFFER: "buffers"}
    for role, nbytes in roles.items():
        kinds[names.get(role, "optimizer states")] += nbytes
    return [(kind, nbytes) for kind, nbytes in kinds.items() if nbytes]


_OPACITY = {"weights": "1", "masters": ".72", "optimizer states": ".44", "buffers": ".25"}


def _draw_named(canvas: Canvas, picture: Picture, checkpoint: Checkpoint, *, by_part: bool) -> None:
    most, places = max([1, *picture.holders.values()]), coordinates(checkpoint)
    named_axes = {axis for at in places.values() for axis, number in at.items() if number}
    there = {kind for roles in picture.by_role.values() for kind, _ in by_kind(roles)}
    kinds = [kind for kind in _OPACITY if kind in there]
    for holder, nbytes in picture.holders.items():
        name = holder_text([holder]) if isinstance(holder, int) else f"{canvas.label(holder)}: {one_line(holder, 60)}"
        fill = GREY if by_part else canvas.fill((holder,))
        canvas.rect(MARGIN, canvas.y + 2, 18, 14, fill, holder_text([one_line(str(holder), 100)]))
        canvas.say(MARGIN + 26, canvas.y + 14, f"{name} · {show_size(nbytes)}")
        x = canvas.bar
        for kind, count in by_kind(picture.by_role[holder]):
            width = canvas.length * count / most
            more = f' fill-opacity="{_OPACITY[kind]}"'
            canvas.rect(x, canvas.y + 2, width, 14, fill, f"{name}: {show_size(count)} of {kind}", more)
            x += width
        if isinstance(holder, int) and holder in places:
            at = places[holder]
            place = ", ".join(f"{axis.upper()} {at[axis]}" for axis in ("tp", "pp", "dp", "cp") if axis in named_axes)
            canvas.say(canvas.bar + canvas.length + GAP, canvas.y + 14, place, "g")
        canvas.y += 21
    if len(kinds) > 1:
        x = canvas.bar
        for kind in kinds:
            canvas.rect(x, canvas.y + 3, 14, 12, GREY, "", f' fill-opacity="{_OPACITY[kind]}"')
            canvas.say(x + 20, canvas.y + 14, kind, "g")
            x += len(kind) * SANS + 44
        canvas.y += 22
    canvas.y += 8


def _draw_numbered(canvas: Canvas, picture: Picture) -> None:
    """Draw each holder's number in its colour, below a column for its bytes."""
    holders, sizes = list(picture.holders), picture.holders
    shown = holders[: len(COLOURS)]
    width = (canvas.width - 2 * MARGIN) / _PER_LINE
    what = "ranks" if all(isinstance(holder, int) for holder in holders) else "ranks and files"
    least, most = min(sizes.values()), max(sizes.values())
    each = show_size(least) if show_size(least) == show_size(most) else f"{show_size(least)} to {show_size(most)}"
    text = f"{len(holders)} {what}, each with {each}"
    if len(holders) > len(shown):
        text += f". Colours repeat after {len(shown)}: labels and tooltips tell which it is"
    canvas.say(MARGIN, canvas.y + 12, text + ".", "g")
    canvas.y += 20
    column = 0.0 if least == most else _COLUMN
    for start in range(0, len(shown), _PER_LINE):
        for number, holder in enumerate(shown[start : start + _PER_LINE]):
            x, named = MARGIN + number * width, f"{holder_text([holder])}: {show_size(sizes[holder])}"
            if column:
                height = column * sizes[holder] / most
                more = ' class="k" fill-opacity=".5"'
                canvas.rect(x, canvas.y + column - height, width - 2, height, GREY, named, more)
            canvas.rect(x, canvas.y + column + 1, width - 2, 17, canvas.fill((holder,)), named)
            middle = canvas.y + column + 9.5
            canvas.label_in(x + (width - 2) / 2, middle, canvas.label(holder), [canvas.colour(holder)], width, 17)
        canvas.y += column + 24
    canvas.y += 4


def _draw_mesh(canvas: Canvas, picture: Picture, checkpoint: Checkpoint) -> None:
    """Draw pipeline stages vertically, tensor parallel ranks side by side, data parallel apart."""
    places = coordinates(checkpoint)
    sizes = mesh(checkpoint) or {}
    if not 1 < len(places) <= _MAX_MESH or not set(picture.holders) <= set(places) or sizes["tp"] * sizes["pp"] == 1:
        return
    columns = {(at["dp"], at["cp"], at["tp"]) for at in places.values()}
    cell = min(34.0, (canvas.length - 40) / len(columns))
    many = [f"DP {sizes.get('dp', 1)}: groups"] if any(at["dp"] for at in places.values()) else []
    text = ", ".join(["mesh: PP from top to bottom", "TP side by side", *many])
    canvas.say(MARGIN, canvas.y + 14, text, "g")
    for rank, at in places.items():
        group = at["dp"] * sizes.get("cp", 1) + at["cp"]
        x = canvas.bar + (group * sizes["tp"] + at["tp"]) * cell + group * 8
        y = canvas.y + at["pp"] * 22
        said = f"rank {rank}: " + ", ".join(f"{axis.upper()} {number}" for axis, number in at.items())
        holds = rank in picture.holders
        more = "" if holds else ' class="t"'
        canvas.rect(x, y, cell - 2, 20, canvas.colour(rank) if holds else TRACK, said, more)
        if holds:
            canvas.label_in(x + (cell - 2) / 2, y + 10, str(rank), [canvas.colour(rank)], cell - 2, 20)
    canvas.y += sizes["pp"] * 22 + 12


def _draw_kinds(canvas: Canvas, picture: Picture) -> None:
    patches = [patch for row in picture.rows for patch in row.sketch.patches]
    kinds = {patch.kind for patch in patches}
    any_two = list(picture.holders)[:2]
    found: list[tuple[Patch, str]] = []

    def sample(kind: str, holders: Iterable[Holder] = ()) -> Patch:
        return Patch(kind, 0, 0, 1, 1, tuple(holders))  # type: ignore[arg-type]

    if any(patch.kind == "held" and len(patch.holders) > 1 for patch in patches):
        found.append((sample("held", any_two), "copies: each of these ranks holds it"))
    if "several" in kinds:
        found.append((sample("several", any_two), "slices of several ranks, too narrow to draw apart"))
    if "padding" in kinds:
        found.append((sample("padding", any_two[:1]), "padding: stored, means nothing"))
    found += [(sample("hole"), "hole: stored nowhere"), (sample("overlap"), "overlap: stored twice")]
    x = MARGIN
    for patch, text in found:
        draw_patch(canvas, patch, x, canvas.y, 20, 14, has_label=False)
        canvas.say(x + 27, canvas.y + 12, text)
        x += len(text) * SANS + 50
    canvas.y += 32


def draw_patch(
    canvas: Canvas,
    patch: Patch,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str = "",
    *,
    has_label: bool = True,
) -> None:
    if patch.kind == "hole":
        canvas.rect(x + 0.75, y + 0.75, width - 1.5, height - 1.5, PAPER, text, ' class="p o"')
        canvas.mark(x, y, width, height, "hole", "l r")
    elif patch.kind == "overlap":
        canvas.rect(x, y, width, height, RED, text)
        canvas.mark(x, y, width, height, "overlap", "l w")
    elif patch.kind == "padding":
        if patch.holders:
            canvas.rect(x, y, width, height, canvas.fill(patch.holders), "")
        canvas.rect(x, y, width, height, "url(#padding)", text)
    else:
        canvas.rect(x, y, width, height, canvas.fill(patch.holders, patch.kind == "several"), text)
        if has_label:
            ranks = [holder for holder in patch.holders if isinstance(holder, int)]
            files = [canvas.label(holder) for holder in patch.holders if isinstance(holder, str)]
            label = " ".join([*([ranks_text(ranks)] if ranks else []), *files])
            colours = [canvas.colour(holder) for holder in patch.holders]
            canvas.label_in(x + width / 2, y + height / 2, label, colours, width, height)

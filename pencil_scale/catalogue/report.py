"""Catalogue report: what the catalogue contains, as a short table for the terminal and as an HTML page.

The page needs no network and no scripts. The template escapes everything that comes from a shard.
"""

from typing import Any

import jinja2

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.schema import ADVICE, DAMAGED_STATUSES, UNCLEAR_IMAGE, extensions_line, found_line
from pencil_scale.storage.errors import many
from pencil_scale.storage.urls import without_passwords

DAMAGE_SHOWN = 200
UNKNOWN_SHOWN = 50
PAIRS_SHOWN, NAMES_SHOWN = 3, 10
MANY_HELD_OUT = 0.01  # of the rows; a test set that overlaps by more than this is usually a mistake

# A whole number is written with commas, and a float is drawn as a bar of this many percent.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Catalogue</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884; }
th, td { vertical-align: top; min-width: 5rem; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { background: #4a78c8; height: .9rem; min-width: 1px; }
.warning { border-left: 4px solid #c80; padding-left: .75rem; }
</style></head><body>
<h1>Catalogue, version {{ version }}</h1>
<p>{{ origin }}</p>
{% for warning in warnings %}<p class="warning">{{ warning }}</p>{% endfor %}
{% for title, note, columns, rows in sections if rows %}
{% if title %}<h2>{{ title }}</h2>{% endif %}
{% if note %}<p>{{ note }}</p>{% endif %}
<table><tr>{% for column in columns %}
<th{% if rows[0][loop.index0] is integer %} class="number"{% endif %}>{{ column }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}
{% if cell is integer %}<td class="number">{{ "{:,}".format(cell) }}</td>
{% elif cell is float %}<td style="width: 50%"><div class="bar" style="width: {{ cell }}%"></div></td>
{% else %}<td>{{ cell }}</td>{% endif %}
{% endfor %}</tr>{% endfor %}</table>{% endfor %}
</body></html>
"""


def summary_page(catalogue: Catalogue) -> str:
    """Render the catalogue as one HTML page."""
    manifest = catalogue.manifest
    counts = manifest["class_counts"]
    bars = [round(100 * count / max([*counts, 1]), 2) for count in counts]
    classes = list(zip(manifest["classes"], counts, bars, strict=True))
    damage: list[dict[str, Any]] = []
    for table in catalogue.small_tables("damage_tables"):
        damage += table.slice(0, DAMAGE_SHOWN - len(damage)).to_pylist()
    samples_note = "Examples of each status. The catalogue has a row for every damaged sample."
    damage_note = (
        f"Data that could not be turned into rows: {len(damage):,} of {sum(manifest['damage'].values()):,} "
        "entries. All entries are in the Parquet files listed in the manifest as damage_tables."
    )
    examples = [
        [one[name] for name in ("status", "row", "key", "detail")] for one in manifest["damaged_samples"]
    ]
    lost = [[one["kind"], (one["key"] or "")[:200], one["detail"]] for one in damage]
    unknown = list(manifest["unknown_labels"].items())[:UNKNOWN_SHOWN]
    words = [(word, count, ADVICE.get(word, "")) for word, count in _words(manifest)]
    sections = [
        ("", "", (), _facts(manifest)),
        ("Classes", "", ("class", "samples", ""), classes),
        ("Sample status and damage", "", ("status", "count", "what to do"), words),
        ("Damaged samples", samples_note, ("status", "row", "key", "details"), examples),
        ("Damaged shards", damage_note, ("kind", "key", "details"), lost),
        ("Labels that match no class", "", ("label", "samples"), unknown),
    ]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_PAGE).render(
        version=catalogue.version,
        origin=f"Created {manifest['created']} from {many(len(catalogue.shards), 'shard')}. Sample ids: "
        f"{manifest['identity']}. Labels: {without_passwords(manifest['label'])}.",
        warnings=[*alarms(manifest), *notes(manifest)],
        sections=sections,
    )


def summary_text(catalogue: Catalogue, name: str) -> str:
    """Render the catalogue as a short table."""
    manifest = catalogue.manifest
    words = [(word, f"{count:,}: {ADVICE.get(word, '')}") for word, count in _words(manifest) if word != "ok"]
    rows = [*_facts(manifest), *words]
    width = max(len(label) for label, _ in rows)
    lines = [f"{name} catalogue, version {catalogue.version}: {catalogue.folder}"]
    lines += [f"  {label:<{width}}  {value}" for label, value in rows]
    unknown = [f"{text!a} {count:,}" for text, count in manifest["unknown_labels"].items()][:5]
    if unknown:
        lines.append(f"  labels that match no class: {', '.join(unknown)}")
    lines += [f"  note: {note}" for note in notes(manifest)]
    return "\n".join([*lines, f"  report: {catalogue.folder}/summary.html"])


def alarms(manifest: dict[str, Any]) -> list[str]:
    """List what is usually a mistake, so that the command warns about it every time it runs."""
    return [found for found in (_held_out(manifest), _unlabelled(manifest), _wrong(manifest)) if found]


def notes(manifest: dict[str, Any]) -> list[str]:
    """List what else a person should check before training."""
    found = []
    num_rows, extensions = manifest["num_rows"], extensions_line(manifest["suffixes"])
    unclear = sum(manifest["status"].get(status, 0) for status in UNCLEAR_IMAGE)
    if unclear > num_rows / 2:
        found.append(f"{unclear:,} of {num_rows:,} samples have no image or several; {extensions}")
    others = manifest["num_duplicates_of_other_content"]
    if others:
        found.append(
            f"{many(others, 'duplicate')} with the id of a different image; is data.identity "
            f"{manifest['identity']} right? (try shard_key)"
        )
    equal = manifest["equal_content"]
    if equal["num_proven_wrong"]:
        found.append(
            f"{many(equal['num_conflicting_images'], 'image')} with different labels: at least "
            f"{many(equal['num_proven_wrong'], 'wrong label')} ({equal['proven_noise']:.2%})"
        )
    if manifest["window"]["num_chunks"] > 1:
        least = f"set data.window_mb to at least {_window_mb(manifest):,}"
        found.append(f"classes are unevenly spread over the shards: {least}")
    empty = sum(count == 0 for count in manifest["class_counts"])
    if empty:
        found.append(f"{empty:,} of {manifest['num_classes']:,} classes have no ok sample")
    return found


def _unlabelled(manifest: dict[str, Any]) -> str | None:
    num, num_rows = manifest["status"].get("unlabelled", 0), manifest["num_rows"]
    if num <= num_rows / 2:
        return None
    return (
        f"{num:,} of {num_rows:,} samples have no label, for example {manifest['unlabelled_id']!a}; is "
        f"data.label {without_passwords(manifest['label'])} right? "
        f"({found_line(manifest['suffixes'], manifest['json_fields'])})"
    )


def _wrong(manifest: dict[str, Any]) -> str | None:
    """Warn if labels and true classes seem to follow different class lists."""
    truth = manifest["truth"]
    known, wrong, mostly = truth["num_known"], truth["num_wrong"], truth["mostly"]
    if 2 * wrong <= known and not mostly:
        return None
    found = f"{wrong:,} of {known:,} labels differ from their true class (data.truth)"
    if not mostly:
        return f"{found}; is data.label {without_passwords(manifest['label'])} right?"
    pairs = [f"most samples with label {label!a} are {true!a}" for label, true in mostly.items()]
    more = f" and {len(pairs) - PAIRS_SHOWN:,} more" if len(pairs) > PAIRS_SHOWN else ""
    names = ", ".join(map(ascii, manifest["classes"][:NAMES_SHOWN]))
    return (
        f"{found}: {', '.join(pairs[:PAIRS_SHOWN])}{more}; is data.classes in the order of the class numbers "
        f"in the shards? It starts with {names}"
    )


def _held_out(manifest: dict[str, Any]) -> str | None:
    """Warn if many samples are not trained on because a clean set has their ids: often a mistake."""
    num, num_rows = manifest["status"].get("held_out", 0), manifest["num_rows"]
    if num <= MANY_HELD_OUT * num_rows:
        return None
    return (
        f"{num:,} of {num_rows:,} training samples ({num / num_rows:.1%}) are NOT trained on (held_out): "
        f"validation or test samples have the same ids by data.identity {manifest['identity']}; if they are "
        "different images, as with keys that are only numbers or file names, index with "
        "data.identity: shard_key into another run.storage; if they are the same images, this is correct"
    )


def _facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    states = [shard["state"] for shard in manifest["shards"]]
    vanished = states.count("vanished")
    shards = many(len(states) - vanished, "shard") + (f" ({vanished:,} more vanished)" if vanished else "")
    facts = [
        ("samples", f"{manifest['num_samples']:,} in {shards}"),
        ("rows", f"{manifest['num_rows']:,}, of which {manifest['num_ok']:,} ok"),
        ("duplicates", f"{manifest['num_duplicates']:,}"),
        ("classes", f"{manifest['num_classes']:,}"),
    ]
    filled = [count for count in manifest["class_counts"] if count]
    if filled:
        most, least = max(filled), min(filled)
        facts += [
            ("class sizes", f"largest {most:,}, smallest {least:,} ({most / least:.1f} to 1)"),
            ("shuffle window", f"at least {_window_mb(manifest):,} MB (data.window_mb)"),
        ]
    truth = manifest["truth"]
    if truth["num_known"]:
        facts.append(
            ("true classes", f"{truth['num_known']:,} known, {many(truth['num_wrong'], 'label')} wrong")
        )
    odd = {**manifest["oddities"], **{f"{kind} member": n for kind, n in manifest["skipped_members"].items()}}
    return [*facts, *((f"unusual: {kind}", f"{count:,}") for kind, count in odd.items())]


def _window_mb(manifest: dict[str, Any]) -> int:
    return max(1, round(float(manifest["window"]["mb"])))


def _words(manifest: dict[str, Any]) -> list[tuple[str, int]]:
    """Statuses first, damaged ones after the others, then the kinds in the damage table."""
    statuses = sorted(manifest["status"].items(), key=lambda pair: (pair[0] in DAMAGED_STATUSES, -pair[1]))
    return [*statuses, *manifest["damage"].items()]

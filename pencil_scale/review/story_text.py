"""Story text: the story of one sample in lines a person reads from top to bottom.

Epochs count from 1 here, as on the console while a run trains; in files they count from 0.
"""

import json
from collections.abc import Iterator
from textwrap import fill

from pencil_scale.review.story import Chapter, Exported, Story
from pencil_scale.storage.urls import without_passwords

WIDTH = 100
TOLD = (
    "model.backbone",
    "run.seed",
    "stages.backbone.epochs",
    "stages.pencil.epochs",
    "stages.finetune.epochs",
    "stages.pencil.alpha",
    "stages.pencil.lambda",
)


def story_text(story: Story, picture: str) -> str:
    """Spell a story; `picture` says where its thumbnail lies, or why there is none."""
    return "\n".join(_lines(story, picture))


def _lines(story: Story, picture: str) -> Iterator[str]:
    row = story.row
    yield f"sample {_plain(row['sample_id'])}"
    if story.excluded:
        yield "  listed in data.exclude: nothing is trained on it, and it is in no output made since"
        return
    start, end = row["image_offset"], row["image_offset"] + row["image_bytes"]
    yield f"  row        {row['row']:,} of the catalogue, for life"
    yield f"  shard      {without_passwords(row['shard_url'])}"
    yield f"  key        {_plain(row['key'])}"
    yield f"  image      {row['format']}, bytes {start:,} to {end:,} ({row['image_bytes']:,})"
    yield f"  thumbnail  {picture}"
    yield f"  status     {row['status']}"
    yield f"  given      {_plain(row['noisy_class_name'] or 'no class')}"
    if row["true_class_name"] is not None:
        yield f"  truth      {_plain(row['true_class_name'])}, measured against and never trained on"
    for duplicate in story.duplicates:
        yield f"  again in   {_plain(without_passwords(duplicate))}"
    if not story.chapters:
        yield "labels       nobody has published any that hold this sample; train first"
    for chapter in story.chapters:
        yield from _chapter(chapter)
    yield from _pin(story)
    if not story.exports:
        yield "exports      none yet"
    for exported in story.exports:
        yield from _export(exported)


def _chapter(chapter: Chapter) -> Iterator[str]:
    version = "" if chapter.catalogue_version is None else f", catalogue version {chapter.catalogue_version}"
    yield f"{chapter.name}{f' ({chapter.standing})' if chapter.standing else ''}{version}"
    yield f"  model      {without_passwords(chapter.model) if chapter.model else 'none kept'}"
    if chapter.trained_by != chapter.name:
        yield f"  trained by {chapter.trained_by}"
    told = " ".join(f"{key}={chapter.settings[key]}" for key in TOLD if key in chapter.settings)
    yield fill(f"  config     {told or 'not recorded'}", WIDTH, subsequent_indent=" " * 13)
    yield from _label(chapter)


def _label(chapter: Chapter) -> Iterator[str]:
    if chapter.class_name is None:
        yield "  in the end no class: it was given none, and no run trained on it"
        return
    for stay in chapter.stays:
        last = "" if stay.first_epoch == stay.last_epoch else f" to {stay.last_epoch + 1}"
        shares = f"share {stay.first_share:.2f} to {stay.last_share:.2f}"
        yield f"  epochs     {stay.first_epoch + 1}{last}: {_plain(stay.class_name)}, {shares}"
    if not chapter.stays:
        yield "  epochs     no history of them was kept"
    name = _plain(chapter.class_name)
    if chapter.pinned:
        yield f"  in the end {name}, pinned: it did not move"
    elif not chapter.visited:
        yield f"  in the end {name}, as given: no run trained on it"
    else:
        yield f"  in the end {name}, with {chapter.share:.2f} of the label"


def _pin(story: Story) -> Iterator[str]:
    pin = story.pin
    if pin is None:
        yield "pin          none: the label may move"
        return
    note = f" ({_plain(pin['note'])})" if pin["note"] else ""
    by = _plain(pin["by"] or "somebody who left no name")
    yield f"pin          {_plain(pin['class'])}, by {by}, at {pin['at']}{note}"


def _export(exported: Exported) -> Iterator[str]:
    folder, entry = without_passwords(exported.folder), exported.entry
    if entry is None:
        yield f"export       {folder}: not in it"
        return
    issue = "a label issue" if entry["is_label_issue"] else "no label issue"
    score = "" if entry["label_score"] is None else f", score {entry['label_score']:.3f}"
    said = f"{_plain(entry['predicted_class'] or 'no class')}, told by {entry['predicted_by'] or 'nobody'}"
    yield f"export       {folder}"
    yield f"  says       {said}; {issue}{score}, labels {entry['model_version']}"
    if exported.sidecar:
        yield f"  sidecar    {without_passwords(exported.sidecar)}"


def _plain(text: str) -> str:
    """Text from a shard as one line of a terminal: what could move the cursor is spelled out."""
    return text if text.isprintable() else json.dumps(text)

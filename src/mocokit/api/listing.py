"""The verb `recipes`: what there is to start from, and one of them in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from mocokit import config as configuration
from mocokit.errors import UsageError, did_you_mean
from mocokit.options import PretrainOptions
from mocokit.recipes import RECIPES, DataFacts, is_vit, recipe_notes
from mocokit.training.settings import RunConfig

_DECIDED = ("views", "encoder", "contrast", "optim", "train")
"""What a recipe decides; data and execution belong to a run."""


def named_recipes() -> list[dict[str, str]]:
    """Every recipe: name, method, setting, source, and the result published with these values ("" = none)."""
    return [
        {
            "name": name,
            "method": recipe.method,
            "setting": recipe.setting,
            "source": ", ".join(part for part in (recipe.source.paper, recipe.source.where) if part),
            "published": recipe.source.result,
        }
        for name, recipe in RECIPES.items()
    ]


@dataclass(frozen=True, slots=True)
class RecipeSheet:
    """A recipe fitted to so many images at a view size in pixels. notes: what was worked out, in sentences."""

    row: dict[str, str]
    images: int
    image_size: int
    config: RunConfig
    notes: list[str]

    def sections(self) -> dict[str, Any]:
        """Every setting with an effect that the recipe decides. The pixels' mean and deviation come from the data."""
        plain = self.config.to_dict()
        for measured in ("mean", "std"):
            del plain["views"][measured]
        for name in ("contrast", "optim"):
            plain[name] = {key: value for key, value in plain[name].items() if getattr(self.config, name).uses(key)}
        return {name: plain[name] for name in _DECIDED}

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        facts = {"images": self.images, "image_size": self.image_size, "notes": self.notes}
        return self.row | facts | {"sections": self.sections()}

    def to_yaml(self) -> str:
        """A file for `pretrain --config`, with source and notes as comments."""
        row = self.row
        about = [
            f"{row['name']}: {row['method']}, {row['setting']}. Source: {row['source']}.",
            *([f"Published: {row['published']}."] if row["published"] else []),
            f"For {self.images:,} images at {self.image_size} px (--images, --image-size say others).",
            "views.mean and views.std are measured on the data.",
            *self.notes,
        ]
        text = yaml.safe_dump({"recipe": row["name"], **self.sections()}, sort_keys=False, allow_unicode=True)
        return "".join(f"# {line}\n" for line in about) + str(text)


def recipe_sheet(
    name: str, *, images: int | None = None, image_size: int | None = None, backbone: str | None = None
) -> RecipeSheet:
    """The recipe `name` in full, for so many images at a view size in pixels.

    Both default to the data it is made for (`RECIPES[name].usual`). Raises UsageError for an unknown name, fewer images
    than a batch, or a size or backbone that does not go with it.
    """
    if name not in RECIPES:
        raise UsageError(f"No recipe is called '{name}'.{did_you_mean(name, RECIPES)} `mocokit recipes` lists them.")
    usual = RECIPES[name].usual
    S, size = usual.images if images is None else images, usual.image_size if image_size is None else image_size
    batch = RECIPES[name].make(DataFacts(S, size, backbone)).train.batch_size
    if batch > S:
        raise UsageError(f"{name} trains with batches of {batch:,}: --images must be at least that. Got {S}.")
    config = configuration.assemble(
        name,
        PretrainOptions(recipe=name, image_size=size, backbone=backbone),
        {},
        images=S,
        native_side=size,
        side_for=lambda side: side,
        split=None,
        index_hash="",
    )
    described = "moco-v3-vit" if name == "moco-v3" and is_vit(backbone) else name
    row = next(row for row in named_recipes() if row["name"] == described)
    return RecipeSheet(row | {"name": name}, S, size, config, recipe_notes(config))

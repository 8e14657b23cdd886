"""`mocokit recipes`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from mocokit import files
from mocokit.cli.app import Flag, app
from mocokit.errors import UsageError
from mocokit.options import whole_number

_FITTED = Group("Fitted to", sort_key=1)
_Count = Parameter(group=_FITTED, show_default=False, converter=whole_number)


@app.command
def recipes(
    name: str | None = None,
    /,
    *,
    images: Annotated[int | None, _Count] = None,
    image_size: Annotated[int | None, _Count] = None,
    backbone: Annotated[str | None, Parameter(group=_FITTED, show_default=False)] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """List the named recipes with their sources, or print one in full.

    Examples:

        mocokit recipes
        mocokit recipes moco-v2 --images 50000 --image-size 224
        mocokit recipes byol-cifar > byol.yaml

    Parameters
    ----------
    name
        Print this recipe as YAML for `pretrain --config`, every setting that it decides.
    images
        How many images it is fitted to. Default: those it is made for, which the output states.
    image_size
        Side of the views in pixels. Default: likewise.
    backbone
        The backbone, where the recipe depends on it: moco-v3 has a form for ViTs.
    json
        Print it as JSON.
    """
    from mocokit import api

    if name is None:
        for flag, value in (("--images", images), ("--image-size", image_size), ("--backbone", backbone)):
            if value is not None:
                raise UsageError(f"{flag} has no effect on the list. Name a recipe: mocokit recipes small {flag} ...")
        rows = api.named_recipes()
        if json:
            print(files.to_json({"recipes": rows}), end="")
        else:
            _print_table(rows)
        return
    for flag, count in (("--images", images), ("--image-size", image_size)):
        if count is not None and count < 1:
            raise UsageError(f"{flag} must be at least 1. Got {count}.")
    sheet = api.recipe_sheet(name, images=images, image_size=image_size, backbone=backbone)
    print(files.to_json(sheet.to_dict()) if json else sheet.to_yaml(), end="")


def _print_table(rows: list[dict[str, str]]) -> None:
    widths = {key: max(len(row[key]) for row in rows) for key in ("name", "method", "setting")}
    for row in rows:
        print("  ".join([row[key].ljust(width) for key, width in widths.items()]) + f"  {row['source']}")
        if row["published"]:
            print(f"{'':{widths['name']}}  published: {row['published']}")

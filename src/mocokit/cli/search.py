"""`mocokit search`: build, add, remove, query, duplicates, eval, serve, page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import whole_number

if TYPE_CHECKING:
    from mocokit.api.searching import Change

search = App(
    name="search",
    help="Find pictures by pictures: make an index, ask it, judge it, look at it in a browser.\n\n"
    "Start with: `mocokit search build RUN DATA`, then `mocokit search serve RUN`",
    help_format="markdown",
)
app.command(search)

Quiet = Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)]


@search.command
def build(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    data: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    readout: Annotated[Literal["h", "z", "key-h", "key-z"], Parameter(group="Encoder")] = "h",
    kind: Annotated[Literal["auto", "exact", "hnsw", "ivf"], Parameter(group="Index")] = "auto",
    split: Annotated[str | None, Parameter(group="Data")] = None,
    label_column: Annotated[str | None, Parameter(group="Data")] = None,
    group_column: Annotated[str | None, Parameter(group="Data")] = None,
    exclude: Annotated[Path | None, Parameter(group="Data")] = None,
    max_bad: Annotated[float, Parameter(group="Data")] = 0.01,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    overwrite: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Quiet = False,
) -> None:
    """Make an index over the images of a data set.

    Interrupted at any instant, an index that was there before still answers.

    Examples:

        mocokit search build runs/photos photos/
        mocokit search build runs/clips videos/
        mocokit search build runs/photos photos/ --out indexes/photos --kind hnsw

    Parameters
    ----------
    run
        A run folder, or one made by `mocokit finetune`.
    data
        A folder of images, a .csv / .txt list, .parquet, .npz, tar shards, or the name of a built-in set.
    out
        The index folder. Default: RUN/search.
    readout
        h (backbone) or z (head) of the query encoder, or of the key encoder.
    kind
        exact; hnsw or ivf for many images, with their recall@10 against exact search printed; auto: exact up to
        200,000 images, then hnsw.
    split
        Only this split.
    label_column
        Column of a table that holds the label, for filters.
    group_column
        Column that holds the group, for filters.
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    max_bad
        Share of unreadable images above which it stops.
    device
        cpu, cuda, cuda:1; auto = cuda where there is one.
    overwrite
        Replace the index in --out.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    done = api.search_build(
        run,
        data,
        out,
        readout=readout,
        kind=kind,
        split=split,
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        max_bad=max_bad,
        device=device,
        overwrite=overwrite,
        quiet=quiet,
    )
    _print_change(done, json, f"{done.added} images; {done.skipped} unreadable")


@search.command
def add(
    index: Annotated[Path, Parameter(group=REQUIRED)],
    data: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    split: Annotated[str | None, Parameter(group="Data")] = None,
    label_column: Annotated[str | None, Parameter(group="Data")] = None,
    group_column: Annotated[str | None, Parameter(group="Data")] = None,
    exclude: Annotated[Path | None, Parameter(group="Data")] = None,
    again: Annotated[bool, Parameter(group="Data", negative=())] = False,
    max_bad: Annotated[float, Parameter(group="Data")] = 0.01,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    json: Annotated[bool, Flag] = False,
    quiet: Quiet = False,
) -> None:
    """Add the images that an index lacks; only those are encoded.

    An image's id is a hash of its name relative to DATA.

    Examples:

        mocokit search add runs/photos new-photos/

    Parameters
    ----------
    index
        The index folder, or a run folder that has one in RUN/search.
    data
        As in `search build`.
    split
        Only this split.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group.
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    again
        Encode images that are there already once more and replace them.
    max_bad
        Share of unreadable images above which it stops.
    device
        cpu, cuda, cuda:1; auto = cuda where there is one.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    done = api.search_add(
        index,
        data,
        split=split,
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        again=again,
        max_bad=max_bad,
        device=device,
        quiet=quiet,
    )
    _print_change(done, json, f"{done.added} images added, {done.already} were there; {done.skipped} unreadable")


@search.command
def remove(
    index: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    ids: Annotated[list[int] | None, Parameter(group="Which", negative=(), consume_multiple=True)] = None,
    names: Annotated[list[str] | None, Parameter(group="Which", negative=(), consume_multiple=True)] = None,
    labels: Annotated[list[str] | None, Parameter(group="Which", negative=(), consume_multiple=True)] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Remove images from an index. The image files stay.

    Examples:

        mocokit search remove runs/photos --names "2019/*" old.jpg

    Parameters
    ----------
    index
        The index folder, or a run folder that has one in RUN/search.
    ids
        Ids, as a query prints them.
    names
        Names or shell patterns of names.
    labels
        All images with one of these labels.
    json
        Print the result as JSON.
    """
    from mocokit import api

    done = api.search_remove(index, ids=ids or (), names=names or (), labels=labels or ())
    _print_change(done, json, f"{done.removed} images removed")


@search.command
def query(
    index: Annotated[Path, Parameter(group=REQUIRED)],
    pictures: Annotated[list[Path] | None, Parameter(negative=())] = None,
    /,
    *,
    ids: Annotated[list[int] | None, Parameter(group="Question", negative=(), consume_multiple=True)] = None,
    k: Annotated[int, Parameter(group="Question", converter=whole_number)] = 10,
    together: Annotated[bool, Parameter(group="Question", negative=())] = False,
    labels: Annotated[list[str] | None, Parameter(group="Filter", negative=(), consume_multiple=True)] = None,
    groups: Annotated[list[str] | None, Parameter(group="Filter", negative=(), consume_multiple=True)] = None,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    json: Annotated[bool, Flag] = False,
) -> None:
    """List the images most like one picture, each of several, a folder's, or a stored one.

    Examples:

        mocokit search query runs/photos new.jpg
        mocokit search query runs/photos front.jpg back.jpg --together --labels shoes
        mocokit search query runs/clips video.mp4
        mocokit search query runs/photos --ids 4120987712037

    Parameters
    ----------
    index
        The index folder, or a run folder that has one in RUN/search.
    pictures
        Files, or folders of pictures.
    ids
        Stored images by id; each is left out of its own answer.
    k
        How many to list.
    together
        Ask once, with the mean of all pictures.
    labels
        Only images with one of these labels.
    groups
        Only images of one of these groups.
    device
        cpu, cuda, cuda:1; auto = cuda where there is one.
    json
        Print the answers as JSON.
    """
    from mocokit import api

    answers = api.search_query(
        index,
        pictures or (),
        ids=ids or (),
        k=k,
        labels=labels or (),
        groups=groups or (),
        together=together,
        device=device,
    )
    if json:
        print(files.to_json([answer.to_dict() for answer in answers]), end="")
        return
    for answer in answers:
        print(answer.asked)
        for one in answer.hits:
            found = one.to_dict()
            print(f"  {one.score:.4f}  {found['id']:>19}  {found['name']}{_in_brackets(found['label'])}")


@search.command
def duplicates(
    index: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    threshold: Annotated[float, Parameter(group="Question")] = 0.98,
    json: Annotated[bool, Flag] = False,
) -> None:
    """List clusters of images that are nearly the same.

    Examples:

        mocokit search duplicates runs/photos --threshold 0.99

    Parameters
    ----------
    index
        The index folder, or a run folder that has one in RUN/search.
    threshold
        Cosine from which two images are linked. Clusters are chains of links. What value means "the same" depends on
        the encoder: look at some clusters.
    json
        Print the clusters as JSON.
    """
    from mocokit import api

    clusters = api.search_duplicates(index, threshold=threshold)
    if json:
        print(files.to_json([[one.to_dict() for one in cluster] for cluster in clusters]), end="")
        return
    for cluster in clusters:
        print(f"{len(cluster)} images")
        for one in cluster:
            found = one.to_dict()
            print(f"  {one.score:.4f}  {found['id']:>19}  {found['name']}{_in_brackets(found['label'])}")
    print(f"{len(clusters)} clusters, {sum(map(len, clusters))} images.")


@search.command
def serve(
    index: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    port: Annotated[int, Parameter(group="Server", converter=whole_number)] = 8765,
    token: Annotated[str | None, Parameter(group="Server")] = None,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    quiet: Quiet = False,
) -> None:
    """Look for pictures in a browser on this machine: drop one, or choose one, and see what is like it.

    The address with its token is printed. Only 127.0.0.1 is listened to, nothing is written, and `/openapi.json`
    describes the API.

    Examples:

        mocokit search serve runs/photos

    Parameters
    ----------
    index
        The index folder, or a run folder that has one in RUN/search.
    port
        Port; 0 takes any that is free.
    token
        The token that every request must bring; a new one each time by default.
    device
        cpu, cuda, cuda:1; auto = cuda where there is one.
    quiet
        No hints on stderr.
    """
    from mocokit import api

    api.search_serve(index, port=port, token=token, device=device, quiet=quiet)


@search.command
def page(
    index: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=REQUIRED)],
    quiet: Quiet = False,
) -> None:
    """Write the same page as one file that needs no server, for up to 5,000 images.

    It holds thumbnails, names, labels and vectors, and searches by the images it holds.

    Examples:

        mocokit search page runs/photos --out photos.html

    Parameters
    ----------
    index
        The index folder, or a run folder that has one in RUN/search.
    out
        The .html file.
    quiet
        No hints on stderr.
    """
    from mocokit import api

    print(f"Done: {api.search_page(index, out, quiet=quiet)}")


@search.command(name="eval")
def evaluate(
    runs: Annotated[list[Path], Parameter(group=REQUIRED, negative=())],
    /,
    *,
    labelled: Annotated[str, Parameter(group=REQUIRED)],
    readout: Annotated[Literal["h", "z", "key-h", "key-z"], Parameter(group="Protocol")] = "h",
    k: Annotated[list[int] | None, Parameter(group="Protocol", negative=(), consume_multiple=True)] = None,
    label_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    group_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    exclude: Annotated[Path | None, Parameter(group="Protocol")] = None,
    against: Annotated[list[str] | None, Parameter(group="Protocol", negative=())] = None,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    fail_unless_better: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Quiet = False,
) -> int:
    """Score search by label among the test images: recall@k, mAP, R-precision, with intervals, against baselines.

    Each test image asks once and the others answer. Pixels and random weights are always run; the verdict is about
    mAP.

    Examples:

        mocokit search eval runs/products --labelled products/labels.csv --label-column category
        mocokit search eval runs/a runs/b --labelled photos/ --against older=runs/old --against other=vectors.parquet

    Parameters
    ----------
    runs
        One run, or several that differ in their seed only.
    labelled
        Labelled data, as in `mocokit evaluate`.
    readout
        h (backbone) or z (head) of the query encoder, or of the key encoder.
    k
        The k of recall@k. Default: 1 5 10.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group; an image's own group never answers.
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    against
        A further baseline: NAME=RUN, or NAME=FILE.parquet with the columns id and vector. May be given several times.
    device
        cpu, cuda, cuda:1; auto = cuda where there is one.
    fail_unless_better
        Exit with 1 unless the verdict is BETTER.
    json
        Print the scores as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    result = api.search_eval(
        runs,
        labelled,
        readout=readout,
        k=k or (1, 5, 10),
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        against=against or (),
        device=device,
        quiet=quiet,
    )
    print(files.to_json(result.to_dict()) if json else api.search_table(result), end="")
    return 1 if fail_unless_better and result.verdict.verdict != "BETTER" else 0


def _print_change(done: Change, json: bool, what: str) -> None:
    if json:
        print(files.to_json(done.to_dict()), end="")
    else:
        print(f"Done: {done.index.path}: {what}. {len(done.index)} images in all.")


def _in_brackets(label: str | None) -> str:
    return f"  [{label}]" if label is not None else ""

"""`mocokit evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import whole_number


@app.command
def evaluate(
    runs: Annotated[list[Path], Parameter(group=REQUIRED, negative=())],
    /,
    *,
    labelled: Annotated[str, Parameter(group=REQUIRED)],
    classifier: Annotated[Literal["knn", "linear", "both"], Parameter(group="Protocol")] = "knn",
    labels_per_class: Annotated[str, Parameter(group="Protocol")] = "10",
    draws: Annotated[int, Parameter(group="Protocol", converter=whole_number)] = 20,
    k: Annotated[int | None, Parameter(group="Protocol", converter=whole_number)] = None,
    knn_temperature: Annotated[float, Parameter(group="Protocol")] = 0.1,
    readout: Annotated[Literal["h", "z", "key-h", "key-z"], Parameter(group="Protocol")] = "h",
    random_seeds: Annotated[int | None, Parameter(group="Protocol", converter=whole_number)] = None,
    baseline: Annotated[list[str] | None, Parameter(group="Protocol", negative=())] = None,
    allow_partial: Annotated[bool, Parameter(group="Protocol", negative=())] = False,
    label_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    group_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    exclude: Annotated[Path | None, Parameter(group="Protocol")] = None,
    shuffle_labels: Annotated[bool, Parameter(group="Protocol", negative=())] = False,
    counterfactual: Annotated[list[str] | None, Parameter(group="Protocol", negative=())] = None,
    fail_unless_better: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> int:
    """Score the frozen encoder by kNN or a linear probe against pixels and other weights; print the verdict.

    Examples:

        mocokit evaluate runs/photos --labelled photos-with-labels/
        mocokit evaluate runs/a runs/b runs/c --labelled data.parquet --labels-per-class all
        mocokit evaluate runs/photos --labelled DIR --classifier both --baseline timm:resnet18 --random-seeds 5

    Parameters
    ----------
    runs
        One run, or several that differ in their seed only.
    labelled
        Labelled data: ROOT/{train,val,test}/CLASS/..., ROOT/CLASS/..., or a table with a label column.
    classifier
        What reads the features: knn, linear (logistic regression, its penalty chosen inside the label budget, or on
        the validation split with all labels), or both (the verdict is then kNN's; the probe's is printed above it).
    labels_per_class
        Labels per class that the classifier may see, or `all`.
    draws
        How often such a set of labels is drawn.
    k
        Neighbours that vote. Default: chosen inside each label draw by cross-validation; 200 with all labels.
    knn_temperature
        Sharpness of the votes, exp(cosine / knn_temperature). Not InfoNCE's T.
    readout
        What the verdict is about: h (backbone) or z (head) of the query encoder, or of the key encoder.
    random_seeds
        Random initialisations of the same architecture to compare with. Default: as many as runs.
    baseline
        Further weights to compare with; may be given several times. timm:NAME (timm's pretrained weights, when they
        are on this machine; nothing is fetched), FILE.safetensors or .pt (the run's architecture), or NAME=FILE.
    allow_partial
        Take a --baseline file that holds less than 90 % of the backbone's tensors.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product); a group is never split.
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    shuffle_labels
        Control: shuffle the training labels; every score must fall to chance.
    counterfactual
        Also compare the features of the test images with those of the same images changed, before and after
        training: channel-swap, grayscale, flip, shift or brightness. May be given several times.
    fail_unless_better
        Exit with 1 unless the verdict is BETTER.
    json
        Print the verdict as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    result = api.evaluate(
        runs,
        labelled,
        classifier=classifier,
        labels_per_class=labels_per_class,
        draws=draws,
        k=k,
        knn_temperature=knn_temperature,
        readout=readout,
        random_seeds=random_seeds,
        baseline=baseline or (),
        allow_partial=allow_partial,
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        shuffle_labels=shuffle_labels,
        counterfactual=counterfactual or (),
        quiet=quiet,
    )
    print(files.to_json(result.to_dict()) if json else api.table_and_verdict(result), end="")
    return 1 if fail_unless_better and result.verdict.verdict != "BETTER" else 0

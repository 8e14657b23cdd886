"""The named recipes: a method with its paper's values, and a setting that adapts them to a kind of data.

`moco-v2` is the method as published for ImageNet; `moco-v2-cifar`, `-small` and `-medical` change what the data ask
for. Where a value is not from a paper or its authors' own release, the docstring says "ours".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mocokit.contrast.encoders import EncoderConfig
from mocokit.contrast.steps import ContrastConfig
from mocokit.data.generated_videos import generated_name
from mocokit.data.views import ViewConfig, view_recipe
from mocokit.training.optim import OptimConfig
from mocokit.training.settings import RunConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a recipe may adapt to: S images, the side of the views in pixels, the backbone where one was named."""

    images: int
    image_size: int
    backbone: str | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sections a recipe decides, before what is in `fitted` (K, backbone) is fitted to the data.

    why: reasons for values that were adapted or worked out, by place: {"optim.lr": "0.03 for every 256 images"}.
    """

    views: ViewConfig
    encoder: EncoderConfig
    contrast: ContrastConfig
    optim: OptimConfig
    train: TrainConfig
    fitted: tuple[str, ...] = ("K", "backbone")
    why: Mapping[str, str] = field(default_factory=dict)

    def value(self, place: str) -> object:
        """The value at a place such as "optim.lr"."""
        section, key = place.split(".")
        return getattr(getattr(self, section), key)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on each value that was adapted or worked out."""
        return tuple(_note(place, self.value(place), reason) for place, reason in self.why.items())


def _note(place: str, value: object, reason: str) -> str:
    shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"
    return f"{place.split('.')[1]} {shown}: {reason}"


def _scaled(base: float, batch: int) -> tuple[float, dict[str, str]]:
    """The linear rule, lr = base x batch / 256, for the recipe's own batch size, and that it was used."""
    reason = f"{base:g} for every 256 images of the recipe's batches of {batch:,}; --batch-size leaves it as it is"
    return base * batch / 256, {"optim.lr": reason}


# ------------------------------------------------------------------------------------------------- methods


def moco_v1(facts: DataFacts) -> Recipe:
    """He et al. 2020, sections 3.3 and 4: linear head, T 0.07, m 0.999, SGD 0.03 with a step decay, 200 epochs of 256.

    Deviation: K is fitted to the data (65,536 from 370,000 images), and older keys of a query's own image are masked.
    """
    return Recipe(
        views=view_recipe("moco-v1", facts.image_size),
        encoder=EncoderConfig(head="linear"),
        contrast=ContrastConfig(T=0.07, m=0.999),
        optim=OptimConfig(lr=0.03, schedule="step"),
        train=TrainConfig(epochs=200, batch_size=256),
    )


def moco_v2(facts: DataFacts) -> Recipe:
    """Chen et al. 2020, section 3: MLP head, stronger views, cosine schedule, T 0.2; otherwise as v1."""
    return Recipe(
        views=view_recipe("moco-v2", facts.image_size),
        encoder=EncoderConfig(head="mlp"),
        contrast=ContrastConfig(T=0.2, m=0.999),
        optim=OptimConfig(lr=0.03, schedule="cosine"),
        train=TrainConfig(epochs=200, batch_size=256),
    )


def moco_v3(facts: DataFacts) -> Recipe:
    """Chen et al. 2021, section 3, and the released configuration of 300 epochs; with a ViT as `moco_v3_vit`.

    Batches of 4,096, LARS 0.3 x batch / 256, weight decay 1e-6, warm-up of 10 epochs, T 1 (with the loss times 2T), m
    from 0.99 to 1, heads 4096 wide to 256 dimensions, BYOL's views with crops from 0.2 of the area.
    Deviation: the release starts the last norm of each residual block at 0; here it is as the backbone comes.
    """
    if is_vit(facts.backbone):
        return moco_v3_vit(facts)
    lr, why = _scaled(0.3, 4096)
    return Recipe(
        views=replace(view_recipe("byol", facts.image_size), crop_area=(0.2, 1.0)),
        encoder=EncoderConfig(head="mlp-bn-all", hidden=4096, dim=256, predictor="mlp-bn"),
        contrast=ContrastConfig(method="moco-v3", T=1.0, m=0.99, m_end=1.0),
        optim=OptimConfig(kind="lars", lr=lr, weight_decay=1e-6, warmup_epochs=10),
        train=TrainConfig(epochs=300, batch_size=4096),
        why=why,
    )


def moco_v3_vit(facts: DataFacts) -> Recipe:
    """Chen et al. 2021, sections 4 and 5, and the released configuration: ViT-B/16, AdamW, a frozen patch projection.

    Batches of 4,096, lr 1.5e-4 x batch / 256, weight decay 0.1, warm-up of 40 epochs of 300, T 0.2, a 3-layer head.
    Deviation: position embeddings are the backbone's own (timm's are learned; the paper's are fixed sines).
    """
    lr, why = _scaled(1.5e-4, 4096)
    return Recipe(
        views=view_recipe("byol", facts.image_size),
        encoder=EncoderConfig(
            backbone="vit_base_patch16_224", head="mlp-bn-all", head_layers=3, hidden=4096, dim=256,
            predictor="mlp-bn-all", freeze_patches=True,
        ),
        contrast=ContrastConfig(method="moco-v3", T=0.2, m=0.99, m_end=1.0),
        optim=OptimConfig(kind="adamw", lr=lr, weight_decay=0.1, warmup_epochs=40),
        train=TrainConfig(epochs=300, batch_size=4096),
        fitted=(),
        why=why,
    )  # fmt: skip


def simclr(facts: DataFacts) -> Recipe:
    """Chen et al. 2020 (SimCLR), section 2, default setting: batches of 4,096, LARS 0.3 x batch / 256, 100 epochs.

    Weight decay 1e-6, warm-up of 10 epochs, T 0.1 (table 5), a 2-layer head to 128 dimensions with batch norm after
    both layers, as released.
    """
    lr, why = _scaled(0.3, 4096)
    return Recipe(
        views=view_recipe("simclr", facts.image_size),
        encoder=EncoderConfig(head="mlp-bn-all"),
        contrast=ContrastConfig(method="simclr", T=0.1),
        optim=OptimConfig(kind="lars", lr=lr, weight_decay=1e-6, warmup_epochs=10),
        train=TrainConfig(epochs=100, batch_size=4096),
        why=why,
    )


def byol(facts: DataFacts) -> Recipe:
    """Grill et al. 2020, implementation details: batches of 4,096, LARS 0.2 x batch / 256, 1,000 epochs, m 0.996 to 1.

    Weight decay 1.5e-6, warm-up of 10 epochs, head and predictor 4096 wide to 256 dimensions, no norm on their outputs.
    """
    lr, why = _scaled(0.2, 4096)
    return Recipe(
        views=view_recipe("byol", facts.image_size),
        encoder=EncoderConfig(head="mlp-bn", hidden=4096, dim=256, predictor="mlp-bn"),
        contrast=ContrastConfig(method="byol", m=0.996, m_end=1.0),
        optim=OptimConfig(kind="lars", lr=lr, weight_decay=1.5e-6, warmup_epochs=10),
        train=TrainConfig(epochs=1000, batch_size=4096),
        why=why,
    )


def is_vit(backbone: str | None) -> bool:
    """Whether the backbone of that name is a vision transformer with a patch projection."""
    return backbone is not None and backbone.rpartition(":")[2].startswith(("vit_", "deit"))


# ------------------------------------------------------------------------------------------------ settings


def imagenet(recipe: Recipe, _: DataFacts) -> Recipe:
    """As published."""
    return recipe


def cifar(recipe: Recipe, _: DataFacts) -> Recipe:
    """For 50,000 pictures of 32 px: ResNet-18 with the small stem, batches of 512, 200 epochs, no blur.

    MoCo v1 and v2: the values of the authors' CIFAR-10 notebook: K 4096, T 0.1, m 0.99, SGD 0.06 with a cosine, weight
    decay 5e-4, batch norm in 8 groups, views of v2 without blur and crops from 0.08. It has a linear head, as v1 does;
    v2 keeps its MLP. SimCLR: 1,000 epochs, LARS 1 x batch / 256, T 0.5, half the colour strength, as the released
    code's README has it (appendix B.9 of the paper for ResNet-50). MoCo v3 and BYOL: ours, their ImageNet values with
    heads 2048 wide, m from 0.99 and no solarisation; an AdamW stays.
    """
    plain = replace(recipe.views, blur=0.0, blur_second=None, solarize=0.0, solarize_second=None)
    method, optim = recipe.contrast.method, recipe.optim
    encoder, contrast, epochs = recipe.encoder, recipe.contrast, 200
    if not is_vit(encoder.backbone):
        encoder = replace(encoder, backbone="resnet18")
    if method == "moco":
        lr, why = _scaled(0.03, 512)
        plain = replace(view_recipe("moco-v2", plain.size), blur=0.0, crop_area=(0.08, 1.0))
        contrast = replace(contrast, K=4096, T=0.1, m=0.99, bn_groups=8)
        optim = replace(optim, lr=lr, weight_decay=5e-4, schedule="cosine")
    elif method == "simclr":
        lr, why = _scaled(1.0, 512)
        plain = replace(plain, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
        contrast, optim, epochs = replace(contrast, T=0.5), replace(optim, lr=lr), 1000
    else:
        lr, why = _scaled(optim.lr * 256 / recipe.train.batch_size, 512)
        encoder, contrast, optim = replace(encoder, hidden=2048), replace(contrast, m=0.99), replace(optim, lr=lr)
    return replace(
        recipe, views=plain, encoder=encoder, contrast=contrast, optim=optim,
        train=replace(recipe.train, epochs=epochs, batch_size=512), fitted=(), why=why,
    )  # fmt: skip


def small(recipe: Recipe, facts: DataFacts) -> Recipe:
    """For up to some hundred thousand images on modest machines: a faster key encoder, a sharper softmax. All ours.

    Batches of 256, SGD 0.12 (0.03 under a linear head, which was seen to collapse at 0.12) with weight decay 1e-4 and
    half an epoch of warm-up (LARS is for batches of thousands; an AdamW stays, at 1.5e-4, with a tenth of the run as
    warm-up), T at most 0.1 (MoCo v3: 0.2), m 0.99 while the queue is at most 32,768, heads at most 1024 wide, and no
    image seen more than 100 times nor 20 million in all.
    """
    S, batch = facts.images, 256
    epochs = max(min(100, 20_000_000 // max(S, 1)), 20)
    why = {"train.epochs": f"each of the {S:,} images at most 100 times, and 20 million in all"}
    optim, contrast, encoder = recipe.optim, recipe.contrast, recipe.encoder
    if optim.kind == "adamw":
        lr, reason = _scaled(1.5e-4, batch)
        optim = replace(optim, lr=lr, warmup_epochs=epochs / 10)
        why |= reason
    else:
        lr = 0.03 if encoder.head == "linear" else 0.12
        optim = OptimConfig(lr=lr, weight_decay=1e-4, warmup_epochs=0.5, schedule=optim.schedule)
        why["optim.lr"] = f"SGD with batches of {batch}, warmed up; --batch-size leaves it as it is"
    if contrast.uses("T"):
        contrast = replace(contrast, T=min(contrast.T, 0.2 if contrast.method == "moco-v3" else 0.1))
        why["contrast.T"] = "a sharp softmax, for few negatives"
    if contrast.has_queue:
        keys = default_queue_size(S, batch)
        contrast = replace(contrast, m=0.99 if keys <= 32768 else 0.999)
        why["contrast.m"] = (
            f"the recipe's queue for {S:,} images, {keys:,} keys, is renewed within {keys // batch} of its steps"
        )
    elif contrast.has_momentum:
        contrast = replace(contrast, m=0.99)
        why["contrast.m"] = "rising to 1; few steps leave no time for a slower start"
    if encoder.hidden is not None:
        encoder = replace(encoder, hidden=min(encoder.hidden, 1024))
        why["encoder.hidden"] = f"{recipe.encoder.hidden} in the paper, for a backbone of 2048 features"
    train = replace(recipe.train, epochs=epochs, batch_size=batch)
    return replace(recipe, encoder=encoder, contrast=contrast, optim=optim, train=train, why=why)


def medical(recipe: Recipe, facts: DataFacts) -> Recipe:
    """As `small`, for scans: no hue, mild crop. Ours, but for the turns of up to 10 degrees and mirror images.

    Those are MoCo-CXR's views (Sowrirajan et al. 2021): crops and blur may remove what a diagnosis rests on, and grey
    pictures have no colour to change. Added here: crops from half the area, brightness and contrast by a fifth.
    """
    found = small(recipe, facts)
    views = ViewConfig(
        size=facts.image_size, crop_area=(0.5, 1.0), flip=0.5, rotation=10.0, jitter=0.8, brightness=0.2, contrast=0.2
    )
    why = {
        **found.why,
        "views.hue": "colours, where there are any, mean something; no grey, blur or solarisation either",
        "views.crop_area": "a finding near the edge should stay in view",
    }
    if found.contrast.uses("mask_group"):
        why["contrast.mask_group"] = (
            "with --group-column (the patient) and --mask-group another picture of the patient is no negative"
        )
    return replace(found, views=views, why=why)


def digits(facts: DataFacts) -> Recipe:
    """MoCo v2 for the built-in digits: views that move, turn and zoom; no mirror image, no hue. All ours.

    The low learning rate matters: where a short queue and a fast query meet, the network first learns to tell this
    step's keys from older ones by how far everything has drifted, and the features suffer.
    """
    views = view_recipe("mnist-like", facts.image_size)
    return Recipe(
        views=replace(views, rotation=40.0, zoom=(0.7, 1.4), shift=0.2, brightness=0.2, contrast=0.2, noise=0.0),
        encoder=EncoderConfig(backbone="small-cnn-32-64-128-128", head="mlp"),
        contrast=ContrastConfig(K=256, T=0.1, m=0.99),
        optim=OptimConfig(lr=0.006, weight_decay=1e-4, warmup_epochs=3.0),
        train=TrainConfig(epochs=120, batch_size=64),
        fitted=(),
    )


def moving_shapes(facts: DataFacts) -> Recipe:
    """MoCo v2 for the built-in moving shapes: views that hide colour and size and leave the motion whole. All ours.

    No crop: it would cut the path short and stretch its speed. Red and blue change places, half of the views are grey.
    """
    views = ViewConfig(
        size=facts.image_size, flip=0.5, zoom=(0.85, 1.2), jitter=1.0, brightness=0.3, contrast=0.3, channel_swap=0.5,
        grayscale=0.5,
    )  # fmt: skip
    return Recipe(
        views=views,
        encoder=EncoderConfig(head="mlp", dim=64),
        contrast=ContrastConfig(K=512, T=0.1, m=0.99),
        optim=OptimConfig(lr=0.06, weight_decay=1e-4, warmup_epochs=1.0),
        train=TrainConfig(epochs=20, batch_size=32),
        fitted=("backbone",),
    )


# --------------------------------------------------------------------------------------------------- names


@dataclass(frozen=True, slots=True)
class Source:
    """Where a method's values are from: the paper, where in it, and what was published with them ("" = nothing)."""

    paper: str
    where: str
    result: str = ""


@dataclass(frozen=True, slots=True)
class NamedRecipe:
    """A recipe by name. usual: the data it is made for."""

    method: str
    setting: str
    make: Callable[[DataFacts], Recipe]
    source: Source
    usual: DataFacts


_METHODS: dict[str, tuple[str, Callable[[DataFacts], Recipe], Source]] = {
    "moco-v1": ("MoCo v1", moco_v1, Source("He et al. 2020, arXiv 1911.05722", "sections 3.3 and 4",
        "60.6 % ImageNet linear, ResNet-50, 200 epochs")),
    "moco-v2": ("MoCo v2", moco_v2, Source("Chen et al. 2020, arXiv 2003.04297", "section 3",
        "67.5 % ImageNet linear, ResNet-50, 200 epochs")),
    "moco-v3": ("MoCo v3", moco_v3, Source("Chen et al. 2021, arXiv 2104.02057", "section 3; the release's CONFIG.md",
        "72.8 % ImageNet linear, ResNet-50, 300 epochs (release)")),
    "simclr": ("SimCLR", simclr, Source("Chen et al. 2020, arXiv 2002.05709", "section 2; the release's README",
        "about 64.5 % ImageNet linear, ResNet-50, 100 epochs (release)")),
    "byol": ("BYOL", byol, Source("Grill et al. 2020, arXiv 2006.07733", "implementation details, augmentations",
        "74.3 % ImageNet linear, ResNet-50, 1,000 epochs")),
}  # fmt: skip

_SETTINGS: dict[str, tuple[Callable[[Recipe, DataFacts], Recipe], DataFacts]] = {
    "imagenet": (imagenet, DataFacts(1_281_167, 224)),
    "cifar": (cifar, DataFacts(50_000, 32)),
    "small": (small, DataFacts(10_000, 64)),
    "medical": (medical, DataFacts(50_000, 224)),
}

_NOTEBOOK = Source("the CIFAR-10 notebook of the MoCo release", "", "82.6 % CIFAR-10 kNN, ResNet-18, 200 epochs")
_README = Source("the README of the SimCLR release", "", "about 91 % CIFAR-10 linear, ResNet-18, 1,000 epochs")
_ELSEWHERE: dict[tuple[str, str], Source] = {
    ("moco-v1", "cifar"): _NOTEBOOK,
    ("moco-v2", "cifar"): replace(_NOTEBOOK, result=""),
    ("simclr", "cifar"): _README,
}
"""Settings with a source of their own."""


def _compose(method: str, setting: str) -> NamedRecipe:
    label, start, source = _METHODS[method]
    adapt, usual = _SETTINGS[setting]
    if setting != "imagenet":
        source = _ELSEWHERE.get((method, setting), Source(source.paper, f"the method; {setting}: ours"))
    return NamedRecipe(label, setting, lambda facts: adapt(start(facts), facts), source, usual)


RECIPES: dict[str, NamedRecipe] = {
    "small": _compose("moco-v2", "small"),
    "digits": NamedRecipe("MoCo v2", "digits", digits, Source("ours", ""), DataFacts(1437, 24)),
    "moving-shapes": NamedRecipe(
        "MoCo v2", "moving shapes", moving_shapes, Source("ours", ""), DataFacts(1200, 24)
    ),
    **{
        method if setting == "imagenet" else f"{method}-{setting}": _compose(method, setting)
        for method in _METHODS
        for setting in _SETTINGS
    },
    "moco-v3-vit": NamedRecipe(
        "MoCo v3", "imagenet", moco_v3_vit,
        Source("Chen et al. 2021, arXiv 2104.02057", "sections 4 and 5; the release's CONFIG.md",
            "76.7 % ImageNet linear, ViT-B/16, 300 epochs"),
        DataFacts(1_281_167, 224),
    ),
}  # fmt: skip
"""Every recipe; `small` is the short name of `moco-v2-small`."""


# --------------------------------------------------------------------------------------- fitted to the data


def auto_recipe(spec: str, images: int) -> str:
    """The recipe that `auto` stands for."""
    if spec in ("digits", "moved-digits"):
        return "digits"
    if generated_name(spec) is not None:
        return "moving-shapes"
    return "small" if images < 200_000 else "moco-v2"


def default_queue_size(images: int, batch_size: int) -> int:
    """K for S images: the power of two nearest to S/8, at least 4 batches, at most 65,536.

    On small data a long queue mostly holds an image's own and its neighbours' old keys. Masking a query's own
    source keeps any K honest; a K of this size keeps the masked share small.
    """
    nearest = 2 ** round(math.log2(max(images / 8, 1)))
    return int(min(max(nearest, 4 * batch_size), 65536))


def default_backbone(image_size: int) -> str:
    """The backbone for views of that side in pixels."""
    return "small-cnn" if image_size <= 32 else "resnet18"


def default_clip_backbone(image_size: int) -> str:
    """The backbone for clips of that side in pixels."""
    return "small-3d" if image_size <= 64 else "r3d_18"


def recipe_notes(config: RunConfig) -> list[str]:
    """Plain sentences on what the run's recipe worked out or adapted to its data; nothing on what was set by hand.

    Where the batch size is not the recipe's but the learning rate is, the proportional rate is named.
    """
    if config.recipe not in RECIPES:
        return []
    S, size, batch = config.data.images, config.views.size, config.train.batch_size
    recipe = RECIPES[config.recipe].make(DataFacts(S, size, config.encoder.backbone))
    notes = []
    if config.contrast.has_queue and "K" in recipe.fitted and default_queue_size(S, batch) == config.contrast.K:
        limits = {65536: "the most a recipe takes", 4 * batch: f"4 batches of {batch:,}, the least a recipe takes"}
        usual = f"the power of two nearest to an eighth of {S:,} images"
        exact = 2 ** round(math.log2(max(S / 8, 1))) == config.contrast.K
        notes.append(_note("contrast.K", config.contrast.K, usual if exact else limits[config.contrast.K]))
    backbone = default_clip_backbone(size) if config.encoder.clip else default_backbone(size)
    if "backbone" in recipe.fitted and config.encoder.backbone == backbone:
        published = RECIPES[config.recipe].setting == "imagenet"
        other = "the paper's is ResNet-50 (--backbone resnet50)" if published else "name another freely"
        notes.append(_note("encoder.backbone", config.encoder.backbone, f"for views of {size} px; {other}"))
    for place, reason in recipe.why.items():
        section, key = place.split(".")
        if getattr(getattr(config, section), key) == recipe.value(place):
            notes.append(_note(place, recipe.value(place), reason))
    if batch != recipe.train.batch_size and config.optim.lr == recipe.optim.lr:
        notes.append(
            f"batch_size {batch:,}: the learning rate is that for the recipe's {recipe.train.batch_size:,}; in "
            f"proportion it would be --lr {config.optim.lr * batch / recipe.train.batch_size:.3g}"
        )
    return notes

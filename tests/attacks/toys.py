"""Targets small enough to reason about, in plain torch: what the auditor builds from a plan, by hand.

A toy release is encode -> clip -> sum -> noise -> divide of per-example gradients; `encode` is one matrix, so
that dense, masked and projected releases are the identity, some of its rows and any orthonormal rows.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakbench.attacks.core import (
    ActiveServer,
    Examples,
    LabelAccess,
    ModelAccess,
    Network,
    NotApplicable,
    Observation,
    Operation,
    ReleasedPart,
    SeenMessage,
    SeenMessages,
    SeenTranscript,
    Shadows,
    Structure,
    Target,
    balanced_halves,
    granted,
)

CLASSES = 4


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear_net(shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A linear layer with bias on the flattened input."""
    size = int(torch.tensor(shape).prod())
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, CLASSES)).to(dtype)
    return _drawn(net, seed)


def conv_net(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two smooth convolutions and a linear layer, for inputs [1, 8, 8]."""
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(6 * 16, CLASSES),
    )
    return _drawn(net.to(dtype), seed)


def relu_net(
    shape: tuple[int, ...], *, width: int = 48, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A linear layer, a ReLU and another linear layer, on the flattened input."""
    size = int(torch.tensor(shape).prod())
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.ReLU(), nn.Linear(width, CLASSES)).to(dtype)
    return _drawn(net, seed)


def batch_norm_net(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A convolution and a batch norm in evaluation mode, whose statistics are those of other examples."""
    norm = nn.BatchNorm2d(12, momentum=None)  # the mean over all that was seen
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3, stride=2, padding=1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(12 * 16, CLASSES)
    )
    net = _drawn(net.to(dtype), seed)
    with torch.no_grad():
        net.train()(examples(64, (1, 8, 8), seed=98).inputs.to(dtype))
    return net.eval()


def described(model: nn.Module, encoder: Tensor, input_shape: tuple[int, ...]) -> Structure:
    """The equations of a chain of layers and of a release: coordinates, directions, or something else."""
    assert isinstance(model, nn.Sequential)
    operations = [Operation(name="input", kind="input", inputs=(), shape=input_shape, words="the input")]
    passing = torch.zeros(1, *input_shape, dtype=next(model.parameters()).dtype)
    for name, layer in model.named_children():
        passing = layer(passing)
        kind = {nn.Conv2d: "conv2d", nn.Linear: "linear", nn.Flatten: "flatten", nn.Tanh: "tanh", nn.ReLU: "relu"}
        kind[nn.BatchNorm2d] = "batch_norm"
        about: dict[str, object] = {}
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            about = {"weight": f"{name}.weight", "bias": f"{name}.bias"}
        if isinstance(layer, nn.Conv2d):
            plain = ("kernel_size", "stride", "padding", "dilation", "groups")
            about["settings"] = {key: getattr(layer, key) for key in plain}
        if isinstance(layer, nn.BatchNorm2d):
            names = {"mean": f"{name}.running_mean", "variance": f"{name}.running_var"}
            about["settings"] = {**names, "eps": layer.eps}
        operations.append(
            Operation(
                name=name,
                kind=kind[type(layer)],
                inputs=(operations[-1].name,),
                shape=tuple(passing.shape[1:]),
                words=name,
                **about,  # type: ignore[arg-type]
            )
        )
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = {name: v.clone() for name, v in model.named_buffers()}
    network = Network(operations=tuple(operations), parameters={**values, **held}, loss="cross_entropy")
    single = bool((encoder.count_nonzero(dim=1) == 1).all()) and bool((encoder.sum(dim=1) == 1).all())
    if single:
        part = ReleasedPart(start=0, stop=len(encoder), kind="coordinates", coordinates=encoder.argmax(dim=1))
    elif torch.allclose(encoder @ encoder.T, torch.eye(len(encoder), dtype=encoder.dtype), atol=1e-4):
        spans = ((0, encoder.shape[1]),)
        part = ReleasedPart(start=0, stop=len(encoder), kind="directions", spans=spans, bases=(encoder.T.clone(),))
    else:
        part = ReleasedPart(start=0, stop=len(encoder), kind="other")
    shapes = tuple(tuple(value.shape) for value in values.values())
    return Structure(network=network, names=tuple(values), shapes=shapes, parts=(part,))


def rows(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Per-example gradients [n, d]; labels are indices or probabilities."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Mapping[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(parameters), (one[None],)), label[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)
    return torch.cat([part.flatten(1) for part in gradients.values()], dim=1)


@dataclass(kw_only=True)
class Step:
    """One training step as its operator sees it; `observe` gives what an attacker sees.

    Attributes:
        encoder: [m, d], rows -> released space.
        noise_std: [m], on the undivided sums.
    """

    model: nn.Module
    batch: Examples
    encoder: Tensor
    noise_std: Tensor
    clip_norm: float | None = None
    expected_batch: float = 1.0
    low: float = 0.0
    high: float = 1.0
    seed: int = 0

    def contributions(self, inputs: Tensor, labels: Tensor) -> Tensor:
        encoded = rows(self.model, inputs, labels) @ self.encoder.T
        if self.clip_norm is None:
            return encoded
        return encoded * (self.clip_norm / encoded.norm(dim=1, keepdim=True)).clamp(max=1)

    def observe(self, **granted: object) -> Observation:
        simulate: Callable[..., Tensor] = lambda x, y: self.contributions(x, y).sum(0) / self.expected_batch  # noqa: E731
        noise = self.noise_std * torch.randn(
            self.noise_std.shape, generator=generator(self.seed), dtype=self.noise_std.dtype
        )
        own = self.contributions(self.batch.inputs, self.batch.labels).detach()
        released = (own.sum(0) + noise) / self.expected_batch
        std = self.noise_std / self.expected_batch

        def others_removed(part: slice = slice(None)) -> Tensor:
            candidates = granted["candidates"]
            assert isinstance(candidates, Examples)
            took_part = (candidates.ids[part, None] == self.batch.ids[None]).double()
            return (released * self.expected_batch).double() - (own.double().sum(0) - took_part @ own.double())

        if "candidates" in granted:
            granted = {"others_removed": others_removed, **granted}
        return Observation(
            released=released,
            simulate=simulate,
            contributions=lambda x, y: self.contributions(x, y).detach(),
            residual=lambda predicted: (released - predicted) / torch.where(std > 0, std, 1.0),
            logits=self.model,
            input_shape=tuple(self.batch.inputs.shape[1:]),
            input_low=self.low,
            input_high=self.high,
            classes=CLASSES,
            step=0,
            expected_batch=self.expected_batch,
            structure=lambda: described(self.model, self.encoder, tuple(self.batch.inputs.shape[1:])),
            **granted,  # type: ignore[arg-type]
        )


def examples(count: int, shape: tuple[int, ...], *, seed: int, first_id: int = 0) -> Examples:
    """Smooth random inputs in [0, 1] with random labels."""
    coins = generator(seed)
    flat = torch.rand(count, *shape, generator=coins)
    if len(shape) == 3:  # blurred: real images are smooth, and attacks may rely on it
        flat = nn.functional.avg_pool2d(nn.functional.pad(flat, (2, 2, 2, 2), mode="replicate"), 5, stride=1)
        flat = (flat - flat.amin((1, 2, 3), keepdim=True)) / (
            flat.amax((1, 2, 3), keepdim=True) - flat.amin((1, 2, 3), keepdim=True)
        )
    labels = torch.randint(CLASSES, (count,), generator=coins)
    return Examples(ids=torch.arange(first_id, first_id + count), inputs=flat, labels=labels)


def conv_step(
    encoder: Tensor | None = None,
    *,
    noise: float | Tensor = 0.0,
    count: int = 1,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Observation, Examples]:
    model = conv_net(seed=seed, dtype=dtype)
    dim = sum(p.numel() for p in model.parameters())
    encoder = torch.eye(dim, dtype=dtype) if encoder is None else encoder.to(dtype)
    drawn = examples(count, (1, 8, 8), seed=seed)
    batch = Examples(ids=drawn.ids, inputs=drawn.inputs.to(dtype), labels=drawn.labels)
    std = torch.as_tensor(noise, dtype=dtype).expand(len(encoder)).clone()
    step = Step(model=model, batch=batch, encoder=encoder, noise_std=std, clip_norm=clip_norm, seed=seed)
    return step.observe(labels=batch.labels, batch_size=count), batch


def parameters_of_conv_net() -> int:
    return sum(p.numel() for p in conv_net().parameters())


def probe(count: int = 1) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=generator(70), dtype=torch.float64)


def subset(source: Examples, keep: Tensor) -> Examples:
    return Examples(ids=source.ids[keep], inputs=source.inputs[keep], labels=source.labels[keep])


def everything(step: Step, **extra: object) -> dict[str, object]:
    """Every field that a threat model can grant, filled."""
    return {
        "labels": step.batch.labels,
        "batch_size": len(step.batch),
        "population": examples(16, tuple(step.batch.inputs.shape[1:]), seed=99, first_id=1000),
        "noise_std": step.noise_std,
        **extra,
    }


NETS: dict[str, Callable[..., nn.Module]] = {
    "conv": conv_net,
    "relu": lambda seed: relu_net((1, 8, 8), seed=seed),
    "linear": lambda seed: linear_net((1, 8, 8), seed=seed),
    "batch_norm": batch_norm_net,
}
"""Networks of single updates; a closed form inverts some of them."""


def update_target(*, net: str = "conv", seed: int = 0, noise: float = 0.0) -> tuple[Observation, Examples]:
    """One update of a batch of one, and the truth: that batch."""
    model = NETS[net](seed=seed)
    dim = sum(p.numel() for p in model.parameters())
    batch = examples(1, (1, 8, 8), seed=seed)
    step = Step(model=model, batch=batch, encoder=torch.eye(dim), noise_std=torch.full((dim,), noise), seed=seed)
    seen = step.observe(**everything(step, candidates=batch))
    return replace(seen, prior=among_others(batch, seed=seed), remainder=seen.released.double()), batch


def among_others(sought: Examples, *, count: int = 10, seed: int = 0) -> Examples:
    """A prior: one example among `count - 1` others, at a place that is drawn."""
    others = examples(count - 1, tuple(sought.inputs.shape[1:]), seed=seed + 500)
    order = torch.randperm(count, generator=generator(seed + 501))
    inputs, labels = torch.cat([sought.inputs, others.inputs]), torch.cat([sought.labels, others.labels])
    return Examples(ids=torch.arange(count), inputs=inputs[order], labels=labels[order])


def membership_step(*, seed: int = 0, noise: float, count: int = 400) -> tuple[Observation, Tensor]:
    """One linear-net update with `count` candidates, half of which took part, and the truth [count]."""
    model = linear_net((1, 4, 4), seed=seed)
    dim = sum(p.numel() for p in model.parameters())
    candidates = examples(count, (1, 4, 4), seed=seed)
    member = torch.randperm(count, generator=generator(seed + 1)) < count // 2
    step = Step(
        model=model,
        batch=subset(candidates, member),
        encoder=torch.eye(dim),
        noise_std=torch.full((dim,), noise),
        clip_norm=1.0,
        expected_batch=float(count // 2),
        seed=seed + 2,
    )
    return step.observe(**everything(step, candidates=candidates)), member


def sparse_step(*, seed: int = 0, noise: float = 0.1, count: int = 400, joined: int = 12) -> tuple[Observation, Tensor]:
    """A few of many candidates, of pixels that are independent and centred: their gradients point apart."""
    model = linear_net((256,), seed=seed)
    dim = sum(p.numel() for p in model.parameters())
    candidates, public = (
        replace(some, inputs=some.inputs - 0.5)
        for some in (examples(count, (256,), seed=seed), examples(300, (256,), seed=seed + 9, first_id=1000))
    )
    member = torch.randperm(count, generator=generator(seed + 1)) < joined
    step = Step(
        model=model,
        batch=subset(candidates, member),
        encoder=torch.eye(dim),
        noise_std=torch.full((dim,), noise),
        clip_norm=1.0,
        expected_batch=float(joined),
        low=-0.5,
        high=0.5,
        seed=seed + 2,
    )
    return step.observe(**everything(step, candidates=candidates, population=public)), member


def rounded_step(*, seed: int = 0, noise: float = 100.0, count: int = 400) -> tuple[Observation, Tensor]:
    """As `membership_step`, undivided and under so much noise that the digits of float32 alone tell who took part."""
    model = linear_net((1, 16, 16), seed=seed)
    dim = sum(p.numel() for p in model.parameters())
    candidates = examples(count, (1, 16, 16), seed=seed)
    member = torch.randperm(count, generator=generator(seed + 1)) < count // 2
    step = Step(
        model=model,
        batch=subset(candidates, member),
        encoder=torch.eye(dim),
        noise_std=torch.full((dim,), noise),
        clip_norm=1.0,
        seed=seed + 2,
    )
    return step.observe(**everything(step, candidates=candidates)), member


def transcript(*, seed: int = 0, noise: float, steps: int = 4, count: int = 400) -> tuple[SeenTranscript, Tensor]:
    """A few such steps with the same members, and the truth [count]."""
    observed = []
    member = torch.zeros(0)
    for index in range(steps):
        # The same candidates and members at every step, fresh noise at each.
        step, member = membership_step(seed=seed, noise=0.0, count=count)
        fresh = noise * torch.randn(step.released.shape, generator=generator(1000 + 50 * seed + index))
        released = step.released + fresh / step.expected_batch
        others = step.others_removed
        assert others is not None
        observed.append(
            Observation(
                **{
                    **vars(step),
                    "released": released,
                    "noise_std": torch.full_like(released, noise),
                    "others_removed": lambda part=slice(None), others=others, fresh=fresh: others(part) + fresh,
                    "step": index,
                }
            )
        )
    return SeenTranscript(steps=observed, candidates=observed[0].candidates, final=model_target(seed=seed)[0]), member


def messages(*, seed: int = 0, noise: float, rounds: int = 4, count: int = 400) -> tuple[SeenMessages, Tensor]:
    """Messages of a single such step each, of a client whose records half of the candidates are; and the truth."""
    transcript_of_steps, member = transcript(seed=seed, noise=noise, steps=rounds, count=count)
    final = model_target(seed=seed)[0]
    model = linear_net((1, 4, 4), seed=seed)
    slices, start = {}, 0
    for name, part in model.named_parameters():
        slices[name] = (start, start + part.numel())
        start += part.numel()
    sent = []
    for number, step in enumerate(transcript_of_steps.steps):
        sums = step.released * step.expected_batch
        sent.append(
            SeenMessage(
                round=number,
                global_model=ModelAccess(logits=step.logits, input_shape=step.input_shape, classes=step.classes),
                slices=slices,
                sent={"values": -step.released},
                displacement=-step.released,
                sums=sums,
                weights=(1.0,),
                contributions=step.contributions,
                gradients=lambda x, y: rows(model, x, y).detach(),
                noise_std=noise,
                others_removed=step.others_removed,
                population=examples(40, (1, 4, 4), seed=97, first_id=2000),
            )
        )
    return SeenMessages(
        messages=sent, models=[m.global_model for m in sent], candidates=final.candidates, final=final
    ), member


def active_target(
    *,
    net: str = "relu",
    seed: int = 0,
    noise: float = 0.0,
    count: int = 1,
    clip_norm: float | None = None,
    calls: int = 1,
) -> tuple[ActiveServer, Examples]:
    """A client of some images that answers to chosen models without a block, and the truth: its images."""
    batch = examples(count, (1, 8, 8), seed=seed)

    def observed(model: nn.Module, number: int) -> Observation:
        dim = sum(p.numel() for p in model.parameters())
        std, own = torch.full((dim,), noise), seed + number
        step = Step(model=model, batch=batch, encoder=torch.eye(dim), noise_std=std, clip_norm=clip_norm, seed=own)
        return step.observe(**everything(step, candidates=batch))

    knows = {"labels": batch.labels, "batch_size": count, "candidates": batch}
    return _active(NETS[net](seed=seed), observed, calls, noise, knows), batch


def active_membership_target(*, seed: int = 0, noise: float, count: int = 400) -> tuple[ActiveServer, Tensor]:
    """A client whose records half of the candidates are, which answers to chosen models; and the truth."""
    model = linear_net((1, 4, 4), seed=seed)
    candidates = examples(count, (1, 4, 4), seed=seed)
    member = torch.randperm(count, generator=generator(seed + 1)) < count // 2

    def message(model: nn.Module, number: int) -> SeenMessage:
        dim = sum(p.numel() for p in model.parameters())
        step = Step(
            model=model, batch=subset(candidates, member), encoder=torch.eye(dim), noise_std=torch.full((dim,), noise),
            clip_norm=1.0, seed=seed + 2 + number,
        ).observe(candidates=candidates)  # fmt: skip
        return SeenMessage(
            round=number,
            global_model=ModelAccess(logits=step.logits, input_shape=step.input_shape, classes=step.classes),
            slices={},
            sent={"values": -step.released},
            displacement=-step.released,
            sums=step.released,
            weights=(1.0,),
            contributions=step.contributions,
            gradients=lambda x, y: rows(model, x, y).detach(),
            noise_std=noise,
            others_removed=step.others_removed,
        )

    return _active(model, message, 2, noise, {"informed": True, "candidates": candidates}), member


def _active(
    model: nn.Module, answer: Callable[[nn.Module, int], Target], calls: int, noise: float, knows: dict[str, Any]
) -> ActiveServer:
    """A target whose client answers as `answer` says to a network and the number of the call."""
    shape, made = tuple(knows["candidates"].inputs.shape[1:]), []

    def built(parameters: Mapping[str, Tensor]) -> nn.Module:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                parameter.copy_(parameters[name])
        return changed

    def release(parameters: Mapping[str, Tensor], block: Mapping[str, Tensor] | None) -> Target:
        if block is not None:
            raise NotApplicable("toys have no blocks")
        made.append(None)
        return answer(built(parameters), len(made) % calls)  # the same noise for the next attack

    return ActiveServer(
        release=release,
        calls=calls,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        network=lambda: granted(described(model, torch.eye(1), shape).network),
        logits=lambda parameters, inputs: built(parameters)(inputs).detach(),
        gradient_norms=lambda parameters, inputs, labels: rows(built(parameters), inputs, labels).double().norm(dim=1),
        input_shape=shape,
        input_low=0.0,
        input_high=1.0,
        classes=CLASSES,
        noise_multiplier=noise,
        population=examples(64, shape, seed=97, first_id=2000),
        **knows,
    )


def model_target(*, seed: int = 0, memory: float = 4.0, count: int = 400) -> tuple[ModelAccess, Tensor]:
    """A table that remembers its members with that many nats of logit, and the truth [count]."""
    candidates = examples(count, (1, 4, 4), seed=seed)
    member = torch.randperm(count, generator=generator(seed + 1)) < count // 2
    bonus = memory * member[:, None] * torch.eye(CLASSES)[candidates.labels]
    table = bonus + torch.randn(count, CLASSES, generator=generator(seed + 3))

    def logits(inputs: Tensor) -> Tensor:
        nearest = torch.cdist(inputs.flatten(1), candidates.inputs.flatten(1)).argmin(dim=1)
        return table[nearest]

    def squares(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        away = logits(inputs).double().softmax(dim=1) - torch.eye(CLASSES)[labels]
        return {"table": away.square().sum(dim=1)}

    population = examples(16, (1, 4, 4), seed=98, first_id=1000)
    access = ModelAccess(
        logits=logits,
        input_shape=(1, 4, 4),
        classes=CLASSES,
        candidates=candidates,
        population=population,
        shadows=shadow_tables(candidates, population, memory=memory, seed=seed),
        parameters={"table": table},
        gradients_squared=squares,
    )
    return access, member


def learned_transcript(*, seed: int = 0, steps: int = 4, count: int = 400) -> tuple[SeenTranscript, Tensor]:
    """Such steps, at whose models the logits of members' labels rise by as many nats as steps were taken."""
    seen, _ = transcript(seed=seed, noise=1.0, steps=steps, count=count)
    final, member = model_target(seed=seed, memory=float(steps), count=count)
    at = [model_target(seed=seed, memory=float(index), count=count)[0] for index in range(steps)]
    learned = [replace(step, logits=model.logits) for step, model in zip(seen.steps, at, strict=True)]
    return replace(seen, steps=learned, final=final, candidates=final.candidates), member


def label_target(*, seed: int = 0, count: int = 400) -> tuple[LabelAccess, Tensor]:
    """A model that knows its members, mirrored or moved a little too, and answers by chance otherwise."""
    candidates = examples(count, (1, 8, 8), seed=seed)
    member = torch.randperm(count, generator=generator(seed + 1)) < count // 2
    known = torch.cat([candidates.inputs, candidates.inputs.flip(-1)]).flatten(1)

    def labels_of(inputs: Tensor) -> Tensor:
        nearest = torch.cdist(inputs.flatten(1), known).argmin(dim=1) % count
        by_chance = (inputs.double().flatten(1).sum(dim=1) * 1e4).long() % CLASSES
        return torch.where(member[nearest], candidates.labels[nearest], by_chance)

    target = LabelAccess(
        labels_of=labels_of,
        input_shape=(1, 8, 8),
        input_low=0.0,
        input_high=1.0,
        classes=CLASSES,
        candidates=candidates,
        population=examples(16, (1, 8, 8), seed=98, first_id=1000),
    )
    return target, member


def shadow_tables(
    candidates: Examples, population: Examples, *, memory: float, seed: int = 0, models: int = 8
) -> Shadows:
    """Such tables of the adversary's own, each with half of the candidates as members."""
    coins = generator(seed + 4)
    member = balanced_halves(len(candidates), models, coins)
    bonus = memory * member[..., None] * torch.eye(CLASSES)[candidates.labels]
    answers = bonus + torch.randn(models, len(candidates), CLASSES, generator=coins)
    return Shadows(
        logits=answers[:, :, None],
        trained_on=member,
        population=torch.randn(models, len(population), CLASSES, generator=coins),
    )


def moved(value: Any, device: torch.device) -> Any:
    """A target on a device; its functions compute on the CPU, and take and return tensors of the device alone."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(part, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{slot.name: moved(getattr(value, slot.name), device) for slot in fields(value)})
    if not callable(value):
        return value

    def on_device(*arguments: Any, **settings: Any) -> Any:
        given = [leaf for leaf in tree_leaves((arguments, settings)) if torch.is_tensor(leaf) and leaf.ndim]
        assert {tensor.device for tensor in given} <= {device}
        return moved(value(*moved(arguments, torch.device("cpu")), **moved(settings, torch.device("cpu"))), device)

    return on_device


def auc(scores: Tensor, member: Tensor) -> float:
    """Mann-Whitney with half ties, by ranks."""
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    mid_ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]
    inside = int(member.sum())
    return float((mid_ranks[member].sum() - inside * (inside + 1) / 2) / (inside * (len(member) - inside)))


def psnr(guess: Tensor, truth: Tensor) -> float:
    return float(-10 * (guess - truth).square().mean().log10())


def _drawn(net: nn.Module, seed: int) -> nn.Module:
    # Drawn from its own generator: the global one is nobody's in a test.
    coins = generator(seed + 17)
    with torch.no_grad():
        for p in net.parameters():
            fan_in = p[0].numel() if p.ndim > 1 else 1
            p.copy_(torch.randn(p.shape, generator=coins, dtype=p.dtype) / fan_in**0.5)
    return net


class LargestMade(TorchDispatchMode):
    """Entries of the largest tensor with memory of its own that an operation made."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = [leaf for leaf in tree_leaves(found) if torch.is_tensor(leaf)]
        fresh = [leaf.numel() for leaf in made if leaf.untyped_storage().data_ptr() not in given]
        self.entries = max([self.entries, *fresh])
        return found

"""The drop-in for ``hvd.DistributedOptimizer``."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import math
import os
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hvdcomp import checkpointing
from hvdcomp.assignment import Assignment, Told
from hvdcomp.buckets import Bucket, Layout, Spec, natural_key
from hvdcomp.checks import check_count, check_flag, check_number
from hvdcomp.compressors import Compressor
from hvdcomp.compressors.requests import Hyper
from hvdcomp.coordinator import Coordinator, Referee, channel_name, open_channel
from hvdcomp.errors import ReplicaError
from hvdcomp.exchange import Exchange, HorovodTransport, LocalTransport, StepRecord, Transport, check_alike
from hvdcomp.hierarchy import NodeExchange, Nodes, find_nodes
from hvdcomp.horovod_api import initialised_horovod, label_of
from hvdcomp.kernels import warm_up
from hvdcomp.plugin import AUTO, as_compressor, as_schedule, cf_in_force, check_op, layout_of
from hvdcomp.schedules import Assigning, Auto, Schedule

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "HVDCOMP_DISABLE"
"""Environment variable: set to 1, it gives back stock Horovod."""

_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
"""For each process set: optimizers that its members have made, in the same order on all of them."""
_live: weakref.WeakSet[Any] = weakref.WeakSet()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor | str | Any = "none",
    backward_passes_per_step: int = 1,
    op: Any = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    schedule: Schedule | str | None = None,
    granularity: str = "tensor",
    bucket_mb: float = 25.0,
    exclude: Sequence[str] | None = None,
    grad_scaler: Any = None,
    never_slower: bool | None = None,
    hierarchical: bool | None = False,
) -> Any:
    """An optimizer that exchanges compressed gradients between Horovod's workers before each step.

    The first ten arguments are those of ``hvd.DistributedOptimizer``, in its order and with its meaning.

    Args:
        optimizer: any ``torch.optim.Optimizer``; its state, defaults and parameter groups are kept.
        named_parameters: ``model.named_parameters()``; names must be the same on all workers.
        compression: a compressor (``hvdcomp.TopK(cf=100)``), its name (``"topk"``), Horovod's ``Compression.*``, or
            "auto": the 1 % largest elements, by top-k or Ok-Topk, whichever moves fewer bytes with so many workers, and
            dense exchanges where they are measured to be faster.
        backward_passes_per_step: gradients of so many backward passes are summed (not averaged) before an exchange.
        op: ``hvd.Average`` (default) or ``hvd.Sum``; ``hvd.Adasum`` without a compressor only.
        gradient_predivide_factor: gradients are divided by it before the sum, by size / it after; Average only.
        num_groups: deprecated by Horovod; see ``groups``.
        groups: the buckets, as a number or as lists of parameters; others form a bucket each.
        sparse_as_dense: exchange sparse gradients as dense ones.
        process_set: the workers that exchange, all by default.
        schedule: chooses the compression factor of each step, or each tensor's factor or method:
            ``hvdcomp.schedules.GraVAC()``, a name, or None for the compressor's own.
        granularity: what the compressor sees as one: a "tensor", a "bucket", or the "model".
        bucket_mb: MiB of gradients that travel together.
        exclude: globs on names of tensors that stay dense; "1d" stands for all with fewer than two dimensions, "<1024"
            for all of fewer than 1024 elements. None is the compressor's default ("1d" for sparse and low-rank methods,
            nothing for casts); () excludes nothing.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that residuals are kept without its scale.
        never_slower: the honest switch: steps are exchanged dense for as long as that is measured to be faster, and the
            slower kind is looked at again now and then. None switches it on for ``compression="auto"`` only.
        hierarchical: a node's workers average their gradients densely, the first of each node exchanges the compressed
            means with the others', and hands the result on: residuals are the nodes', and only one worker a node
            compresses. It needs nodes of several workers each, as many on all, and ``HOROVOD_DYNAMIC_PROCESS_SETS=1``
            in the environment; None switches it on where that is so. It excludes ``process_set``.

    Returns:
        An instance of the optimizer's own class with ``synchronize()``, ``skip_synchronize()``,
        ``compressor_state_dict()``, ``load_compressor_state_dict()``, ``check_replicas()``, ``untimed()``, and the
        attributes ``last_step`` (:class:`hvdcomp.StepRecord`) and, to be set before a step for a schedule that asks for
        them, ``samples`` of it, its ``loss``, and the ``next_lr`` after it. With ``op=hvd.Adasum``, or with
        ``HVDCOMP_DISABLE=1`` in the environment, it is stock Horovod's, on which these do nothing.

    Raises:
        ValueError: an argument is not allowed, or two do not fit.
        RuntimeError: in elastic mode, or where Horovod does not see the workers that were started.
    """
    hvd = initialised_horovod()
    _check_wrappable(optimizer)
    op = hvd.Average if op is None else op
    subset = process_set is not None and process_set.process_set_id != 0
    process_set = hvd.global_process_set if process_set is None else process_set
    groups = _checked_groups(groups, num_groups)
    stock = {
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        logger.warning("%s is set: this is stock Horovod, without compression", DISABLE_VARIABLE)
        stock_compression = _stock_compression(hvd, compression)
        return _with_extras(hvd.DistributedOptimizer(optimizer, named_parameters, stock_compression, **stock))
    nodes = _nodes(hvd, hierarchical, op, subset=subset)
    compressor = as_compressor(compression, (process_set if nodes is None else nodes.leaders).size())
    check_op(hvd, compressor, op)
    if op == hvd.Adasum:
        return _with_extras(hvd.DistributedOptimizer(optimizer, named_parameters, hvd.Compression.none, **stock))
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise RuntimeError(
            "hvdcomp does not support Horovod's elastic mode yet: a new worker would start without residuals; "
            f"run a fixed number of workers, or set {DISABLE_VARIABLE}=1 for stock Horovod"
        )
    check_count("backward_passes_per_step", backward_passes_per_step, hint="backward passes whose gradients are summed")
    if not check_number("gradient_predivide_factor", gradient_predivide_factor, 0, hint="1 divides after the sum") > 0:
        raise ValueError("gradient_predivide_factor must be > 0, got 0 (gradients are divided by it before the sum)")
    if grad_scaler is not None and not callable(getattr(grad_scaler, "get_scale", None)):
        raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r}")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    schedule, compressor = as_schedule(schedule, compressor)
    layout = layout_of(schedule, compressor, granularity, bucket_mb, exclude)
    if layout.compresses:
        warm_up()
    if never_slower is None:
        never_slower = compression == AUTO and not isinstance(schedule, Auto)  # which looks at dense steps itself
    check_flag("never_slower", never_slower, hint="dense steps where they are measured to be faster")
    if never_slower and any(method.keeps_gradients for method in layout.methods):
        raise ValueError(
            f"never_slower does not fit {compressor!r}, whose state a dense step would not keep up to date: leave it "
            "out, or take a method without momentum of its own"
        )
    namespace = {name: value for name, value in vars(_Distributed).items() if name not in ("__dict__", "__weakref__")}
    # Horovod's broadcast_optimizer_state knows a distributed optimizer by the module of its class.
    namespace |= {"_wrapped": type(optimizer), "__module__": "horovod.torch.optimizer"}
    distributed: Any = type(type(optimizer).__name__, (type(optimizer),), namespace)
    made = distributed.__new__(distributed)
    made._adopt(optimizer)
    made._set_up(
        hvd, named_parameters, layout, schedule, backward_passes_per_step, op == hvd.Sum, gradient_predivide_factor,
        groups, sparse_as_dense, process_set, grad_scaler, never_slower and layout.compresses, nodes,
    )  # fmt: skip
    _refuse_join(hvd, made)
    return made


class _Distributed(torch.optim.Optimizer):
    """The methods of a distributed optimizer; its class is made from these and the class of the user's optimizer."""

    _wrapped: type[torch.optim.Optimizer]

    samples: float
    loss: float | None
    next_lr: float | None
    last_step: StepRecord | None

    # -- construction

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over all that the user's optimizer is; its ``step`` may have been replaced by a scheduler's counter."""
        self.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")})
        self._patch_step_function()
        setattr(optimizer, "_opt_called", True)  # noqa: B010 - that counter sees no steps of ours, and would warn

    def _set_up(
        self,
        hvd: Any,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        layout: Layout,
        schedule: Schedule,
        backward_passes_per_step: int,
        summed: bool,
        predivide_factor: float,
        groups: int | list[list[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: Any,
        grad_scaler: Any,
        never_slower: bool,
        nodes: Nodes | None,
    ) -> None:
        self._never_slower = never_slower
        self.backward_passes_per_step = backward_passes_per_step
        self.process_set = process_set
        self.samples = 1.0
        self.loss = None
        self.next_lr = None
        self.last_step = None
        self.schedule = schedule
        self.compression = layout.compressor
        self._hvd = hvd
        self._label = label_of(_numbers, "hvdcomp", process_set)
        self._layout = layout
        self._groups = groups
        self._summed = summed
        self._predivide_factor = predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self._grad_scaler = grad_scaler
        self._names = _checked_names(named_parameters, self.param_groups)
        if layout.compressor.takes_momentum:
            _check_momentum(layout.compressor, self.param_groups)
        self._parameters: dict[str, Tensor] = {}
        self._gradients = _ParameterGradients(self._parameters, {})
        self._place_of: dict[str, tuple[Bucket, Spec]] = {}
        self._missing: dict[int, int] = {}
        self._delay: dict[str, int] = {}
        self._exchange: Exchange | NodeExchange | None = None
        self._restored: dict[str, Any] | None = None
        self._synchronized = False
        self._should_synchronize = True
        self._skip_step = False
        self._fired = False
        self._lap_start: float | None = None
        self._untimed_s = 0.0
        self._transport: Transport | None = None
        self._nodes = nodes
        self._compressing_set = process_set if nodes is None else nodes.leaders
        self._compressing: Transport | None = None
        """Carries compressed gradients: between all workers, or between leaders and None on the others."""
        if process_set.included():
            self._transport = _open_transport(hvd, process_set, predivide_factor)
            schedule.prepare(self._compressing_set.size())
        if self._compressing_set.included():
            self._compressing = _open_transport(hvd, self._compressing_set, predivide_factor)
        self._take_part(self._new_parameters())

    def _new_parameters(self) -> dict[str, Tensor]:
        """Parameters that need gradients and do not take part yet: all at first, later the added and the unfrozen."""
        found = {}
        for i, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                name = self._names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                if parameter.requires_grad and name not in self._parameters:
                    found[name] = parameter
        return found

    def _take_part(self, parameters: dict[str, Tensor]) -> None:
        if self._transport is None or not parameters:
            return
        for name, parameter in parameters.items():
            self._parameters[name] = parameter
            self._delay[name] = self.backward_passes_per_step
            parameter.register_post_accumulate_grad_hook(self._hook(name))
        if self._exchange is not None:
            specs = [Spec.of(name, parameter) for name, parameter in parameters.items()]
            self._add_buckets(self._buckets_of(specs, first_index=len(self._exchange.buckets)))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        owner = weakref.ref(self)

        def hook(_: Tensor) -> None:
            optimizer = owner()
            if optimizer is not None:
                optimizer._on_gradient(name)

        return hook

    def _build(self) -> Exchange | NodeExchange:
        """Agree with the other workers on the layout: at the first exchange, when sparse gradients are known.

        Raises:
            ReplicaError: on every worker, if their models or optimizers differ.
            ValueError: on every worker, if gradients are sparse, which nodes cannot average.
        """
        assert self._transport is not None
        specs = [Spec.of(name, parameter) for name, parameter in self._parameters.items()]
        groups = self._group_names(specs)
        sparse = [spec.name for spec in specs if self._has_sparse_gradient(spec.name)]
        everyone = check_alike(
            self._transport,
            {"same": self._description(specs, groups), "sparse": sparse},
            f"{self._label}.layout",
        )
        sparse_names = {name for worker in everyone for name in worker["sparse"]}
        if sparse_names and self._nodes is not None:
            raise ValueError(
                f"hierarchical=True needs dense gradients, and that of {min(sparse_names)!r} is sparse: give "
                "sparse_as_dense=True, or leave hierarchical out"
            )
        referee = Referee(open_channel(self._hvd, self._label, self.process_set)) if self._never_slower else None
        compressing = self._open_exchange(referee) if self._compressing is not None else None
        if self._nodes is None:
            assert compressing is not None
            self._exchange = compressing
        else:
            label = f"{self._label}.flat"
            flat = self._new_exchange(self._transport, label, None, referee) if referee is not None else None
            self._exchange = NodeExchange(
                compressing.buckets if compressing is not None else [],
                _open_transport(self._hvd, self._nodes.inside, self._predivide_factor),
                compressing,
                flat,
                self._gradients,
                label=self._label,
                clock=self.schedule.clock,
            )
        self._add_buckets(self._buckets_of(specs, groups=groups, sparse=sparse_names))
        if compressing is not None and self._restored is not None:
            checkpointing.restore(compressing, self._restored)
            self._restored = None
        self._log_memory()
        return self._exchange

    def _open_exchange(self, referee: Referee | None) -> Exchange:
        """The compressed exchange, without buckets yet; collective over those who take part in it."""
        assert self._compressing is not None
        coordinator = None
        if self.schedule.adaptive and not isinstance(self.schedule, Assigning):
            coordinator = Coordinator(self.schedule, open_channel(self._hvd, self._label, self._compressing_set))
        exchange = self._new_exchange(self._compressing, self._label, coordinator, referee)
        if isinstance(self.schedule, Assigning):
            channel = open_channel(self._hvd, self._label, self._compressing_set)
            exchange.assignment = Assignment(self.schedule, self._layout.settings, channel, exchange.buckets)
        return exchange

    def _new_exchange(
        self, transport: Transport, label: str, coordinator: Coordinator | None, referee: Referee | None
    ) -> Exchange:
        return Exchange(
            [],
            transport,
            coordinator,
            label=label,
            check_finite=any(method.checks_finite for method in self._layout.methods),
            cf_at=partial(cf_in_force, self.schedule, self.compression),
            clock=self.schedule.clock,
            referee=referee,
        )

    def _buckets_of(self, specs: list[Spec], **layout: Any) -> list[Bucket]:
        """Buckets of these tensors; a worker that compresses nothing keeps no residuals."""
        buckets = self._layout.buckets(specs, **layout)
        if self._compressing is not None:
            return buckets
        return [Bucket(bucket.index, bucket.dense_parts) for bucket in buckets]

    def _add_buckets(self, buckets: list[Bucket]) -> None:
        assert self._exchange is not None
        self._exchange.buckets.extend(buckets)
        for bucket in buckets:
            self._missing[bucket.index] = len(bucket.members)
            for member in bucket.members:
                self._place_of[member.name] = bucket, member

    def _description(self, specs: list[Spec], groups: Any) -> dict[str, Any]:
        return {
            "parameters": {spec.name: [list(spec.shape), str(spec.dtype)] for spec in specs},
            "compression": repr(self.compression),
            "settings": [repr(method) for method in self._layout.settings],
            "schedule": {key: repr(value) for key, value in self.schedule.describe().items()},
            "granularity": self._layout.granularity,
            "bucket_mb": self._layout.bucket_mb,
            "exclude": list(self._layout.excluded),
            "groups": groups,
            "op": "Sum" if self._summed else "Average",
            "never_slower": self._never_slower,
            "hierarchical": self._nodes is not None,
            "decisions": channel_name(self._hvd, self._compressing_set) if self.schedule.adaptive else None,
            "gradient_predivide_factor": self._predivide_factor,
            "sparse_as_dense": self._sparse_as_dense,
            "loss scale": self._grad_scaler.get_scale() if self._grad_scaler is not None else None,
        }

    def _group_names(self, specs: list[Spec]) -> list[list[str]] | None:
        """The names in each of the user's groups."""
        if self._groups is None or self._groups == 0:
            return None
        if isinstance(self._groups, int):
            from horovod.common.util import split_list

            names = sorted((spec.name for spec in specs), key=natural_key)
            return split_list(names, self._groups)
        return [[self._names[p] for p in group if p in self._names] for group in self._groups]

    def _has_sparse_gradient(self, name: str) -> bool:
        gradient = self._parameters[name].grad
        return gradient is not None and gradient.is_sparse and not self._sparse_as_dense

    def _log_memory(self) -> None:
        if self._transport is not None and self._transport.worker == 0:
            where = "every worker" if self._nodes is None else "the first worker of every node"
            logger.info("residuals for error feedback take %.1f MiB on %s", self.residual_nbytes / 2**20, where)
            if self.schedule_nbytes:
                logger.info("the schedule's sums take %.1f MiB, on worker 0", self.schedule_nbytes / 2**20)

    # -- gradients

    def _on_gradient(self, name: str) -> None:
        """A gradient has been accumulated; the last of a bucket starts its exchange, without waiting for anybody."""
        if self._synchronized:
            self._synchronized = False
            self._skip_step = False
        if self._delay[name] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._fired = True
        self._delay[name] -= 1
        if self._exchange is None or self._delay[name] > 0 or name not in self._place_of:
            return
        bucket, spec = self._place_of[name]
        self._missing[bucket.index] -= 1
        exchange = self._exchange
        if isinstance(exchange, Exchange) and exchange.is_plain(bucket) and not bucket.small:
            exchange.start_plain(spec, self._gradients, scale=self._scale(), summed=self._summed)
        elif self._missing[bucket.index] == 0:
            self._start(exchange, bucket)

    def _start(self, exchange: Exchange | NodeExchange, bucket: Bucket) -> None:
        self._missing[bucket.index] = 0
        scale = self._scale()
        if isinstance(exchange, Exchange) and exchange.is_plain(bucket):
            for spec in bucket.members:
                exchange.start_plain(spec, self._gradients, scale=scale, summed=self._summed)
            return
        decay: dict[str, float] = {}
        if self.compression.takes_momentum:
            hyper = self._hyper()
            decay = {name: scale * hyper[name].weight_decay for name in hyper}
            for part in bucket.parts:
                part.unit.hyper = hyper[part.members[0].name]
        gradients = _ParameterGradients(self._parameters, decay) if decay else self._gradients
        exchange.start(bucket, gradients, scale=scale, summed=self._summed)

    def _scale(self) -> float:
        return 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())

    def _hyper(self) -> dict[str, Hyper]:
        """Each parameter's settings, as its group has them now; the compressor's own where it was given some."""
        own = self.compression
        return {
            self._names[parameter]: Hyper(
                momentum=float(group["momentum"]),
                nesterov=bool(group.get("nesterov", False)),
                weight_decay=float(_first(getattr(own, "weight_decay", None), group.get("weight_decay", 0.0))),
            )
            for group in self.param_groups
            for parameter in group["params"]
        }

    def synchronize(self) -> None:
        """Exchange the gradients and write their mean into every ``p.grad``; blocking.

        A second call before new gradients arrive does nothing. If any worker met a NaN or an Inf, all gradients become
        NaN on every worker and the next ``step()`` leaves the parameters alone; residuals stay as they were.
        """
        if self._synchronized:
            return
        if self._transport is None:
            self._synchronized = True
            return
        try:
            self._take_part(self._new_parameters())
            exchange = self._exchange or self._build()
            record = self._complete(exchange)
        finally:
            self._reset_delays()
        self._synchronized = True
        if record.skipped:
            self._skip_step = True
            self._poison()
        self._finish_record(exchange, record)

    def _complete(self, exchange: Exchange | NodeExchange) -> StepRecord:
        """Start the buckets that no hook has started, and finish all."""
        started = {bucket.index for bucket in exchange.buckets if self._missing[bucket.index] == 0}
        try:
            for bucket in exchange.buckets:
                if bucket.index not in started:
                    self._start(exchange, bucket)
            return exchange.finish()
        except BaseException:
            exchange.drop()
            raise

    def _reset_delays(self) -> None:
        self._fired = False
        for name in self._delay:
            self._delay[name] = self.backward_passes_per_step
        if self._exchange is not None:
            for bucket in self._exchange.buckets:
                self._missing[bucket.index] = len(bucket.members)

    def _poison(self) -> None:
        """NaN in every gradient, so that a GradScaler backs off on every worker."""
        for parameter in self._parameters.values():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, torch.nan)

    def _finish_record(self, exchange: Exchange | NodeExchange, record: StepRecord) -> None:
        self.last_step = record
        now = exchange.clock()
        seconds = math.nan if self._lap_start is None else now - self._lap_start - self._untimed_s
        exchange.conclude(record, seconds, self.samples, self._told())
        self._lap_start = now
        self._untimed_s = 0.0

    def _told(self) -> Told:
        first = self.param_groups[0].get("lr")
        lr = math.nan if first is None else float(first)
        loss = math.nan if self.loss is None else float(self.loss)
        return Told(lr, lr if self.next_lr is None else float(self.next_lr), loss)

    # -- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, then let the wrapped optimizer step.

        Args:
            closure: computes gradients and returns the loss; it runs before the exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        if self._skip_step:
            self._skip_step = False
            return loss
        wrapped: Any = self._wrapped.step
        with self._without_momentum():
            return wrapped(self) if closure is None else wrapped(self, self._replay(closure, loss))

    step.hooked = True  # type: ignore[attr-defined]  # step hooks fire once, in the wrapped step, after the exchange

    def _replay(self, closure: Callable[[], Any], loss: Any) -> Callable[[], Any]:
        """The closure for the wrapped optimizer: its first evaluation is already done and exchanged."""
        done = [loss]

        def evaluate() -> Any:
            if done:
                return done.pop()
            with torch.enable_grad():
                again = closure()
            self.synchronize()
            return again

        return evaluate

    @contextlib.contextmanager
    def _without_momentum(self) -> Iterator[None]:
        """The wrapped optimizer steps without what the compressor has applied already."""
        if not self.compression.takes_momentum:
            yield
            return
        names = ("momentum", "nesterov", "weight_decay")
        kept = [{name: group[name] for name in names if name in group} for group in self.param_groups]
        for group, settings in zip(self.param_groups, kept, strict=True):
            group.update({name: type(value)(0) for name, value in settings.items()})
        try:
            yield
        finally:
            for group, settings in zip(self.param_groups, kept, strict=True):
                group.update(settings)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` does not exchange: for use after ``synchronize()`` and, say, gradient clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``.

        Raises:
            AssertionError: between ``backward()`` and ``step()`` or ``synchronize()``, while gradients are exchanged.
        """
        if self._fired:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._synchronized = False
        self._skip_step = False
        self._wrapped.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``, at the same step on all workers."""
        self._wrapped.add_param_group(self, param_group)
        self._take_part(self._new_parameters())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``; residuals are loaded by ``load_compressor_state_dict``."""
        if self._exchange is not None:
            self._exchange.drop()
        self._synchronized = False
        self._should_synchronize = True
        self._reset_delays()
        groups = self.param_groups
        self._wrapped.load_state_dict(self, state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups  # a scheduler made before wrapping goes on changing these

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes an exchange waits for."""
        self.backward_passes_per_step = passes
        self._reset_delays()

    # -- beyond Horovod's

    @property
    def residual_nbytes(self) -> int:
        """Bytes of all residuals on this worker; 0 before the first exchange."""
        parts = [part for bucket in (self._exchange.buckets if self._exchange else []) for part in bucket.parts]
        return sum(part.feedback.residual.nbytes for part in parts if part.feedback is not None)

    @property
    def schedule_nbytes(self) -> int:
        """Bytes of the gradients' sums that a schedule wants, on worker 0; 0 elsewhere, before the first exchange."""
        exchange = self._compressed_exchange
        return 0 if exchange is None or exchange.assignment is None else exchange.assignment.nbytes

    @property
    def _compressed_exchange(self) -> Exchange | None:
        """The exchange that residuals belong to; None before the first step, and on workers that compress nothing."""
        return self._exchange.between if isinstance(self._exchange, NodeExchange) else self._exchange

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """What happens within it (an evaluation, a checkpoint) is no part of the iteration time that schedules see."""
        began = self.schedule.clock()
        try:
            yield
        finally:
            self._untimed_s += self.schedule.clock() - began

    def compressor_state_dict(self) -> dict[str, Any]:
        """This worker's residuals, the compressors' states, the step and the schedule: every worker saves its own.

        Where nodes exchange, the first worker of each has them, and the others' state is empty.
        """
        if self._transport is None:
            raise ValueError("this process is not in the optimizer's process set, so it has no compressor state")
        if self._compressing is None:
            return {}
        exchange = self._compressed_exchange
        if exchange is not None:
            return checkpointing.state_of(exchange)
        return copy.deepcopy(self._restored) if self._restored is not None else checkpointing.empty(self._compressing)

    def load_compressor_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], on_world_change: str = "error"
    ) -> None:
        """Go on from :meth:`compressor_state_dict`.

        Args:
            state: this worker's own state, or those of all workers that saved, in any order.
            on_world_change: what to do when the number of workers is another: "mean" gives every worker the mean of
                the residuals, which keeps what was not sent yet (needs all states); "drop" starts from zero residuals;
                "error" refuses.

        Raises:
            ValueError: the state does not fit this model, this worker, or the number of workers; nothing has changed.
        """
        if self._compressing is not None:
            self._load(state, self._compressing, on_world_change)
        if isinstance(self._exchange, NodeExchange):
            self._exchange.drop()

    def _load(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], transport: Transport, on_world_change: str
    ) -> None:
        specs = {name: Spec.of(name, parameter) for name, parameter in self._parameters.items()}
        given = state if isinstance(state, Mapping) else [one for one in state if one]
        chosen = checkpointing.choose(given, transport, specs, on_world_change)
        checkpointing.load_schedule(self.schedule, chosen)
        exchange = self._compressed_exchange
        if exchange is None:
            self._restored = chosen
        else:
            checkpointing.restore(exchange, chosen)
        # The next step is timed as it is in an unbroken run, so that a replayed clock replays the schedule.
        self._lap_start, self._untimed_s = self.schedule.clock() if chosen["step"] > 0 else None, 0.0

    def check_replicas(self) -> None:
        """Compare all parameters bitwise between the workers; collective.

        Raises:
            ReplicaError: on every worker, naming the first parameter that differs.
        """
        if self._transport is None:
            return
        digests = {name: _digest(parameter) for name, parameter in sorted(self._parameters.items())}
        everyone = self._transport.gather_objects(digests, f"{self._label}.replicas")
        for worker, other in enumerate(everyone[1:], 1):
            for name in digests:
                if other.get(name) != everyone[0].get(name):
                    raise ReplicaError(f"parameter {name!r} of worker {worker} differs from worker 0's")


class _ParameterGradients:
    """Gradients are read from and written to ``p.grad``.

    Args:
        decay: weight decay that enters a gradient before it is accumulated, by the parameter's name.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._decay = decay

    def read(self, spec: Spec) -> Tensor | None:
        parameter = self._parameters[spec.name]
        decay = self._decay.get(spec.name, 0.0)
        if decay == 0.0 or not parameter.requires_grad:
            return None if parameter.grad is None else parameter.grad.detach()
        decayed = parameter.detach() * decay
        return decayed if parameter.grad is None else parameter.grad.detach() + decayed

    def target(self, spec: Spec, dtype: torch.dtype) -> Tensor | None:
        gradient = self._parameters[spec.name].grad
        usable = gradient is not None and not gradient.is_sparse and gradient.dtype == dtype
        if gradient is None or not usable or not gradient.is_contiguous():
            return None
        return gradient.detach().view(-1)

    def write(self, spec: Spec, mean: Tensor) -> None:
        parameter = self._parameters[spec.name]
        if not parameter.requires_grad:  # frozen since: it takes part in the exchange, but must not move
            return
        if mean.is_sparse:
            parameter.grad = mean
        elif parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = mean.view(spec.shape).to_sparse(1)
        elif parameter.grad is not None:
            parameter.grad.detach().copy_(mean.view(spec.shape))
        else:
            parameter.grad = mean.view(spec.shape).to(spec.dtype, copy=True)


def _open_transport(hvd: Any, process_set: Any, predivide_factor: float) -> Transport:
    if process_set.size() == 1:
        return LocalTransport()
    return HorovodTransport(hvd, process_set, predivide_factor)


def _nodes(hvd: Any, hierarchical: bool | None, op: Any, *, subset: bool) -> Nodes | None:
    """The nodes, if the exchange is to know them; collective unless it is certain that it is not.

    Raises:
        ValueError: on every worker, if the exchange must know them, but cannot.
    """
    if hierarchical is not None:
        check_flag("hierarchical", hierarchical, hint="dense inside a node, compressed between nodes")
    reason = None
    if subset:
        reason = "it is for all workers, and process_set has some of them: leave process_set out"
    elif op == hvd.Adasum:
        reason = "op=hvd.Adasum is no mean"
    if hierarchical is False or (hierarchical is None and reason is not None):
        return None
    if reason is None:
        found = find_nodes(hvd, _open_transport(hvd, hvd.global_process_set, 1.0), "hvdcomp.nodes")
        if isinstance(found, Nodes) or hierarchical is None:
            return found if isinstance(found, Nodes) else None
        reason = found
    raise ValueError(f"hierarchical=True is not possible here: {reason}")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _check_momentum(compressor: Compressor, param_groups: list[dict[str, Any]]) -> None:
    if any("momentum" not in g or g.get("dampening") or g.get("maximize") for g in param_groups):
        raise ValueError(
            f"{compressor.name} applies momentum itself and takes it from the optimizer, so it needs torch.optim.SGD "
            "(or another with a `momentum` in its parameter groups) without dampening and maximize"
        )


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _check_wrappable(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if type(optimizer).__module__ == "horovod.torch.optimizer":
        raise ValueError(
            "the optimizer is distributed already: give hvdcomp.DistributedOptimizer the plain torch.optim optimizer, "
            "in place of hvd.DistributedOptimizer rather than around it"
        )


def _checked_names(
    named_parameters: Iterable[tuple[str, Tensor]] | None, param_groups: list[dict[str, Any]]
) -> dict[Tensor, str]:
    """Parameter -> name."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    named = {id(parameter) for _, parameter in pairs}
    unnamed = [p.shape for group in param_groups for p in group["params"] if id(p) not in named]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Their shapes: "
            + ", ".join(str(tuple(shape)) for shape in unnamed)
        )
    return {parameter: name for name, parameter in sorted(pairs, key=lambda pair: pair[0])}


def _checked_groups(groups: Any, num_groups: int) -> Any:
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if not (isinstance(groups, list) or (isinstance(groups, int) and groups >= 0)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        members = [parameter for group in groups for parameter in group]
        if not all(isinstance(parameter, Tensor) for parameter in members):
            raise ValueError("groups must consist of torch.Tensor.")
        if len({id(parameter) for parameter in members}) != len(members):
            raise ValueError("A parameter can only appear once in groups.")
    return groups


def _stock_compression(hvd: Any, compression: Any) -> Any:
    """What stock Horovod can do with the argument: its own compressions, else none."""
    own = isinstance(compression, type) and issubclass(compression, hvd.compression.Compressor)
    return compression if own else hvd.Compression.none


def _with_extras(optimizer: Any) -> Any:
    """Stock Horovod's optimizer, with what a script may call on ours doing nothing."""
    optimizer.last_step = optimizer.loss = optimizer.next_lr = None
    optimizer.samples = 1.0
    optimizer.residual_nbytes = optimizer.schedule_nbytes = 0
    optimizer.untimed = contextlib.nullcontext
    optimizer.compressor_state_dict = dict
    optimizer.load_compressor_state_dict = lambda state, on_world_change="error": None
    optimizer.check_replicas = lambda: None
    return optimizer


def _refuse_join(hvd: Any, optimizer: Any) -> None:
    """Make ``hvd.join`` say at once what would otherwise hang: other workers wait for this one's payload."""
    if not optimizer._layout.compresses and optimizer._nodes is None:
        return
    _live.add(optimizer)
    if getattr(hvd.join, "_hvdcomp_refuses", False):
        return
    stock_join = hvd.join

    def join(*arguments: Any, **keywords: Any) -> Any:
        if len(_live):
            raise RuntimeError(
                "hvd.join() does not work with compressed gradients, or with hierarchical=True: Horovod's join cannot "
                "complete an allgather, nor what a process set does. Give every worker the same number of steps (drop "
                "or repeat the last batches)"
            )
        return stock_join(*arguments, **keywords)

    join._hvdcomp_refuses = True  # type: ignore[attr-defined]
    hvd.join = join


__all__ = ["DISABLE_VARIABLE", "DistributedOptimizer"]

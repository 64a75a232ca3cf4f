"""Our own: the method and the factor of the least time to a loss, from what updates are worth and what steps take.

GraVAC asks how much of the gradient a step sends. With error feedback the rest is sent later, so that this underrates
high factors. What matters is how much of what is sent is still true when it arrives: `Echo` compares it with the next
gradient, which has seen the step's effect and none of its noise. docs/schedules.md states criterion and assumptions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hvdcomp.schedules.assigning import Assigning, Evidence, Setting, UnitForm
from hvdcomp.schedules.base import check_state_keys

if TYPE_CHECKING:
    from hvdcomp.compressors import Compressor

FACTORS = tuple(10 ** (half / 2) for half in range(1, 7))
"""3.16, 10, 31.6, ... 1000."""
RANKS = (8, 4, 2, 1)
GROWTH = 0.6
"""Power of the factor with which steps lose worth; measured between .5 and .7 on three networks."""
BLOCK = 3
"""Steps of a visit that only times an arm, of which the first is not counted."""
WINDOW, SETTLING = 16, 6
"""Steps between decisions; the first of a visit, in which residuals are those of the arm before."""
WORTH = 0.97
"""An arm must take at most this share of the dense step's time to a loss, which harms nobody."""
SHARE = 0.01
"""Of the time that looking at other families may cost."""
HOLD, LONGEST_HOLD = 100, 100_000
"""Steps between two looks at a family."""
CHANGED = 1.3
"""A ratio of an arm's times beyond which the network is another."""
BELIEVED = math.log(10)
"""How far one window may be from what was known of a family's factors: noise of a few steps must not upset it."""
LOSS = (1 / 64, 64.0)
"""Bounds of x, of what a window may find."""
HOPELESS = 4.0
"""The dense exchange is not even timed at first where it must take so many times as long as another arm."""
GUESS = 50.0
"""The factor at which x is taken to be 1 before it was measured; later it was 30 to 1000 on three networks."""
LONGEST_ECHO = 1024
"""Steps of which echoes are kept until they say something."""


@dataclass(frozen=True)
class Arm:
    """A setting that can be taken.

    Attributes:
        family: settings of one method, whose bytes and worth go with the factor.
        factor: by which the bytes are divided, of two arms of a family in relation to each other.
        exact: nothing is left out or late.
    """

    setting: Setting
    family: str
    factor: float = 1.0
    exact: bool = False


DENSE = Arm({"name": "none"}, "none", exact=True)


@dataclass
class _Visit:
    """The steps since an arm was taken, or since the decision to stay with it.

    Attributes:
        length: steps until the next decision.
        settling: the first steps, in which residuals are those of the arm before.
        looking: it only times the arm, whose family lost when it was last compared.
    """

    arm: int
    length: int
    settling: int
    looking: bool = False
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)


class Auto(Assigning):
    """Takes the arm, a method with a factor or the dense exchange, whose expected time to a loss is the least.

    J(arm) = seconds of a step * (1 + x / 2), where 1 / (1 + x) = <sent, g'> / <g, g'> is the worth of what is sent: its
    alignment with the next gradient g', over that of the gradient g itself. x is measured for the arm in use and grows
    with the factor to the power of 0.6, so that one measurement tells of all factors of a method. Seconds are measured,
    and between visited arms go with the bytes.

    Two arms of every method are timed first, and the dense exchange unless these say that it is hopeless. Then every
    16 steps the arm of the least J is taken, at most one factor above the present one. Other methods and the dense
    exchange are looked at again so rarely that it costs a hundredth of the time. Nothing needs tuning. All units get
    the same setting.

    Args:
        methods: names of methods that are tried beside the compressor's own.
    """

    name = "auto"
    source = "this project (docs/schedules.md)"
    parameter_docs: ClassVar[Mapping[str, str]] = {"methods": "names of methods to try beside the compressor's own"}
    timed = True
    wants_echo = True

    def __init__(self, methods: Sequence[str] = (), *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock=clock)
        self.methods = list(methods)
        self.arms: tuple[Arm, ...] = (DENSE,)
        self._usable = math.inf
        self._scale: dict[str, float] = {}
        self._echo: list[list[float]] = []
        self._reach: dict[str, float] = {}
        self._due: dict[str, int] = {}
        self._hold: dict[str, int] = {}
        self._step = 0
        self._known: dict[int, list[float]] = {}
        self._trial: list[int] | None = None
        self._visit = _Visit(0, BLOCK, BLOCK)
        self._dense_nbytes = 0.0
        self._timed_dense = False

    # -- what there is

    def suit(self, compressor: Compressor) -> None:
        """Its factors, or its ranks, or itself are the arms, beside the dense exchange and `methods`.

        Raises ValueError where a method is not known.
        """
        from hvdcomp.compressors import create  # not above: schedules are read without torch

        others = [create(method) for method in self.methods if method != compressor.name]
        brought = [arm for other in others for arm in _arms_of(other, {"name": other.name})]
        own = _arms_of(compressor, {})
        self.arms = (DENSE, *own, *brought)
        self.first = 1 + len(own) // 2 if own else 0
        self._visit = _Visit(self.first, BLOCK, BLOCK)

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(arm.setting for arm in self.arms)

    def prepare_units(self, units: Sequence[UnitForm]) -> None:
        """A factor that would leave less than an element of the mean unit is not taken."""
        super().prepare_units(units)
        self._usable = max(FACTORS[0], sum(unit.numel for unit in units) / max(1, len(units)))

    @property
    def expected(self) -> dict[str, float]:
        """Seconds to what a dense step reaches, by arm, of those whose time is known; for the log."""
        return {
            _label(arm): self._seconds_to_loss(n) for n, arm in enumerate(self.arms) if self._known and self._knows(n)
        }

    # -- a step

    def assign(self, evidence: Evidence) -> list[int]:
        visit = self._visit
        self._step += 1
        visit.steps += 1
        visit.nbytes.append(float(evidence.bytes_sent))
        self._dense_nbytes = float(evidence.bytes_dense)
        if (visit.steps > 1 or not visit.settling) and 0 < evidence.seconds < math.inf:
            visit.seconds.append(evidence.seconds)
        if evidence.fell_back:  # another's decision: it tells nothing of this arm
            visit.nbytes.pop()
            return [visit.arm] * len(self.units)
        if evidence.echo is not None and visit.steps > visit.settling:
            self._echo.append([evidence.echo.sent, evidence.echo.gradient])
        if visit.steps >= visit.length and visit.seconds:
            self._end_visit()
        return [self._visit.arm] * len(self.units)

    def _end_visit(self) -> None:
        arm = self._visit.arm
        self._note_cost()
        if self._trial is None:
            self._trial = [n for n in self._inner() if n not in self._known]
        if not self._trial and self._is_worth_timing_dense():
            self._trial = [0]
        if self._trial:
            self._take(self._trial.pop(0), BLOCK)
            return
        self._learn_worth()
        self._choose(arm)

    def _note_cost(self) -> None:
        """What the visit told of its arm; if that is another time than before, all times are measured anew."""
        visit = self._visit
        seconds, nbytes = statistics.median(visit.seconds), statistics.median(visit.nbytes)
        before = self._known.get(visit.arm)
        if before is not None and not self._trial and not 1 / CHANGED < seconds / before[0] < CHANGED:
            self._known, self._trial, self._due, self._timed_dense = {}, None, {}, False
        self._known[visit.arm] = [seconds, nbytes]

    def _learn_worth(self) -> None:
        """Where the gradients of neighbouring steps have nothing in common that is beyond chance, wait for more."""
        arm = self.arms[self._visit.arm]
        sent, whole = (sum(column) for column in zip(*self._echo, strict=True)) if self._echo else (0.0, 0.0)
        if arm.exact or whole <= math.sqrt(sum(gradient**2 for _, gradient in self._echo)):
            del self._echo[:-LONGEST_ECHO]
            return
        loss = min(max(whole / sent - 1 if sent > 0 else math.inf, LOSS[0]), LOSS[1])
        known = self._scale.get(arm.family, math.log(GUESS))
        news = math.log(self._factor(self._visit.arm)) - math.log(loss) / GROWTH - known
        self._scale[arm.family] = known + max(-BELIEVED, min(news, BELIEVED)) / 2
        self._echo.clear()

    # -- choosing

    def _choose(self, present: int) -> None:
        family = self.arms[present].family
        if self._visit.length == WINDOW:
            self._reach[family] = self._next_factor(present)
        best = min(self._allowed(), key=self._seconds_to_loss)
        if self.arms[best].family == family and not self._visit.looking:
            for other in dict.fromkeys(arm.family for arm in self.arms if arm.family != family):
                if self._step >= self._due.get(other, 0):
                    if other in self._due:
                        self._look(other, best)
                        return
                    self._wait(other, best, HOLD)
        elif self.arms[best].family != family and self._visit.looking:
            self._wait(family, best, 2 * self._hold.get(family, HOLD))
        self._take(best, WINDOW)

    def _look(self, family: str, best: int) -> None:
        arm = min((n for n in self._allowed() if self.arms[n].family == family), key=self._seconds_to_loss)
        self._wait(family, best, self._hold.get(family, HOLD))
        self._take(arm, _look_steps(self.arms[arm]), looking=True)

    def _wait(self, family: str, best: int, at_least: int) -> None:
        """Look at a family again after so many steps, or after so many more that it costs its share."""
        other = min((n for n in self._allowed() if self.arms[n].family == family), key=self._seconds_to_loss)
        own_s, other_s = self._cost(best)[0], self._cost(other)[0]
        longest = math.ceil(_look_steps(self.arms[other]) * max(other_s - own_s, 0.0) / (SHARE * own_s))
        self._hold[family] = min(max(at_least, longest), LONGEST_HOLD)
        self._due[family] = self._step + self._hold[family]

    def _take(self, arm: int, length: int, looking: bool = False) -> None:
        stays = arm == self._visit.arm and not looking and length == WINDOW
        if not stays:
            self._echo.clear()
        self._visit = _Visit(arm, length, 0 if stays else min(SETTLING, length), looking)

    def _inner(self) -> list[int]:
        """Of every family but the dense exchange two arms, whose times tell those of the others."""
        found: list[int] = []
        for family in dict.fromkeys(arm.family for arm in self.arms[1:]):
            own = self._family(family)
            found += dict.fromkeys((own[len(own) // 2], own[len(own) // 4]))
        return found

    def _is_worth_timing_dense(self) -> bool:
        """Not where it would take many times as long as other arms, as the line through their times has it."""
        if 0 in self._known or self._timed_dense:
            return False
        self._timed_dense = True
        return self._seconds_to_loss(0) <= HOPELESS * min(self._seconds_to_loss(n) for n in self._allowed())

    def _family(self, family: str) -> list[int]:
        """Its arms by their factors, without those that cannot be taken."""
        own = [n for n, arm in enumerate(self.arms) if arm.family == family and arm.factor <= self._usable]
        return sorted(own, key=lambda n: self.arms[n].factor)

    def _allowed(self) -> list[int]:
        """Arms up to one above the last that was used of their family."""
        families = dict.fromkeys(arm.family for arm in self.arms)
        return [
            n
            for family in families
            for n in self._family(family)
            if self.arms[n].factor <= self._reach.get(family, math.inf) and self._knows(n)
        ]

    def _next_factor(self, arm: int) -> float:
        own = [self.arms[n].factor for n in self._family(self.arms[arm].family)]
        return next((factor for factor in own if factor > self.arms[arm].factor), own[-1])

    # -- what an arm is expected to cost

    def _seconds_to_loss(self, arm: int) -> float:
        seconds = self._cost(arm)[0]
        if arm == 0:
            return WORTH * seconds
        if self.arms[arm].exact:
            return seconds
        scale = self._scale.get(self.arms[arm].family, math.log(GUESS))
        return seconds * (1 + math.exp(GROWTH * (math.log(self._factor(arm)) - scale)) / 2)

    def _factor(self, arm: int) -> float:
        """How many times fewer bytes than dense."""
        return max(1.0, self._dense_nbytes / max(self._cost(arm)[1], 1.0))

    def _knows(self, arm: int) -> bool:
        return arm == 0 or any(self.arms[n].family == self.arms[arm].family for n in self._known)

    def _cost(self, arm: int) -> tuple[float, float]:
        """Seconds and bytes of a step: as measured, else on the line through the two nearest arms that were timed."""
        if arm in self._known:
            seconds, nbytes = self._known[arm]
            return seconds, nbytes
        family = self.arms[1 if arm == 0 and len(self.arms) > 1 else arm].family
        timed = [n for n in self._family(family) if n in self._known]
        factor = self.arms[arm].factor
        near, *others = sorted(timed, key=lambda n: abs(math.log(self.arms[n].factor / factor)))
        seconds, nbytes = self._known[near]
        wanted = self._dense_nbytes if arm == 0 else nbytes * self.arms[near].factor / factor
        slope = 0.0
        if others:
            other_s, other_nbytes = self._known[others[0]]
            slope = max(0.0, (other_s - seconds) / (other_nbytes - nbytes)) if other_nbytes != nbytes else 0.0
        slope = min(slope, seconds / nbytes) if nbytes > 0 else slope  # no step takes less than nothing
        return seconds + slope * (wanted - nbytes), wanted

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "arms": [_label(arm) for arm in self.arms],
            "step": self._step,
            "dense": [self._dense_nbytes, self._timed_dense],
            "usable": None if math.isinf(self._usable) else self._usable,
            "known": [[arm, *cost] for arm, cost in self._known.items()],
            "scale": dict(self._scale),
            "echo": [list(pair) for pair in self._echo],
            "reach": dict(self._reach),
            "due": dict(self._due),
            "hold": dict(self._hold),
            "trial": None if self._trial is None else list(self._trial),
            "visit": asdict(self._visit),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`. Raises ValueError for other keys, or a state of other methods."""
        check_state_keys("the auto schedule", state, self.state_dict().keys())
        own = [_label(arm) for arm in self.arms]
        if state["arms"] != own:
            raise ValueError(f"this state of the auto schedule chose between {state['arms']}, not between {own}")
        self._step = state["step"]
        self._dense_nbytes, self._timed_dense = state["dense"]
        self._usable = math.inf if state["usable"] is None else state["usable"]
        self._known = {arm: [seconds, nbytes] for arm, seconds, nbytes in state["known"]}
        self._scale, self._reach = dict(state["scale"]), dict(state["reach"])
        self._due, self._hold = dict(state["due"]), dict(state["hold"])
        self._echo = [list(pair) for pair in state["echo"]]
        self._trial = None if state["trial"] is None else list(state["trial"])
        self._visit = _Visit(
            **{**state["visit"], "seconds": list(state["visit"]["seconds"]), "nbytes": list(state["visit"]["nbytes"])}
        )


def _arms_of(compressor: Compressor, base: Setting) -> list[Arm]:
    """A method's factors, or its ranks, else itself, as changes of `base`; none where it compresses nothing."""
    name = compressor.name
    if name == DENSE.family:
        return []
    if compressor.has_levels:
        return [Arm({**base, "cf": cf}, name, cf) for cf in FACTORS]
    if "rank" in compressor.parameters():
        return [Arm({**base, "rank": rank}, name, 1 / rank) for rank in RANKS]
    return [Arm(base, name, exact=not compressor.error_feedback)]


def _look_steps(arm: Arm) -> int:
    """Time alone is known soon, worth after a window."""
    return BLOCK if arm.exact else WINDOW


def _label(arm: Arm) -> str:
    """ "topk(cf=10)"."""
    inside = ", ".join(f"{name}={value:.4g}" for name, value in arm.setting.items() if name != "name")
    return f"{arm.family}({inside})" if inside else arm.family

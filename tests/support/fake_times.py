"""Step times that nothing measures: for tests in which decisions hang on nothing but what is expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from truedraft.engine.policy import Goodput, RequestView, StepRecord, StepTimes


class FakeClock:
    """Seconds that only tests and their doubles move.

    Args:
        reading_s: that each look at it takes.
    """

    def __init__(self, reading_s: float = 0.0) -> None:
        self.now = 100.0
        self._reading_s = reading_s

    def __call__(self) -> float:
        self.now += self._reading_s
        return self.now


class FakeTimes(StepTimes):
    """Seconds of steps by rows, and of a drafted token by drafter; a further request costs a fifth of the first.

    Args:
        steps: by rows, the last of them for all that follow.
        tokens: by drafter; one that is not named takes `token_s`.
        token_s: of other drafters.
    """

    def __init__(self, steps: Sequence[float], tokens: Mapping[str, float], token_s: float = 0.0) -> None:
        self.steps, self.tokens, self.token_s = steps, tokens, token_s

    def step_s(self, rows: int, contexts: Sequence[int], greedy: bool) -> float:
        return self.steps[min(rows, len(self.steps) - 1)]

    def ready(self, greedy: bool) -> bool:
        return True

    def drafting_s(self, drafter: str, requests: int, depth: int, greedy: bool) -> float:
        return self.tokens.get(drafter, self.token_s) * depth * (1.0 + 0.2 * (requests - 1))

    def catch_up_s(self, drafter: str, behind: int, greedy: bool) -> float:
        return 0.0

    def acceptance(self, drafter: str, view: RequestView) -> Sequence[float]:
        return ()

    def observe(self, record: StepRecord, steps: int = 1, decide_s: float = 0.0) -> None:
        pass

    def measure(self, greedy: bool) -> None:
        pass


class EvenGoodput(Goodput):
    """Goodput at even costs, so that what it decides hangs on verdicts alone."""

    def begin(self, times: StepTimes) -> None:
        super().begin(FakeTimes([1.0 + 0.002 * rows for rows in range(2_000)], {}, token_s=0.05))

"""What goes wrong between a client and a server."""

from __future__ import annotations

from kvstow.errors import KvstowError
from kvstow_api.views import ProblemView


class ApiError(KvstowError):
    """A request that was not answered as asked. `problem` is what the server said; None if it was not reached, said
    nothing that could be understood, or did not answer in time. `status` is that of an answer, None without one."""

    code = "request_failed"

    def __init__(self, message: str, problem: ProblemView | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.status = problem.status if problem else status

    def __reduce__(self) -> tuple[type[ApiError], tuple[str, ProblemView | None, int | None]]:
        return type(self), (str(self), self.problem, self.status)

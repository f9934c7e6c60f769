"""The engine: takes requests, runs one step at a time, and returns outputs.

A step is: schedule, run, look for stop strings, commit, report. An error of one request ends only that request. An
error of a whole step ends the requests of that step, and the engine goes on. Only errors that say that the block
accounting is wrong (`AuditError`, `CoreError`) are raised.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.core.errors import CoreError
from engine.core.identity import TokenIdentity
from engine.core.options import SpeculationMode
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.commit import CommitReport, RequestStats
from engine.runtime.build import build_parts
from engine.runtime.errors import AuditError, RequestError, RunError, StepError
from engine.runtime.models.load import LoadedModel
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams
from engine.runtime.requests import (
    FinishReason,
    RequestMetrics,
    RequestOutput,
    Ticket,
    check_prompt,
    token_ids_of,
)
from engine.runtime.text import Tokenizer


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine's start; `running`, `waiting` and `usage` are those of the last step."""

    steps: int = 0
    prompt_tokens: int = 0  # of prompts that are computed
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0
    resumed_hits: int = 0  # found again after a preemption
    preemptions: int = 0
    swaps: int = 0  # preemptions that saved the blocks in host memory, of requests that are over
    copies: int = 0
    running: int = 0
    waiting: int = 0
    usage: float = 0.0  # share of the pool's slots whose blocks are referred to
    finished: Counter[str] = field(default_factory=Counter)  # by reason

    def note_step(self, plan: StepPlan, report: CommitReport) -> None:
        """Count a step that has been committed."""
        self.steps += 1
        self.preemptions += len(plan.preempted)
        self.copies += len(plan.copies)
        self.running, self.waiting = plan.running - len(report.finished), plan.waiting
        use = plan.usage
        held = use.token + use.reserved + use.internal if self.running else 0
        self.usage = held / max(1, use.capacity)

    def note_tokens(self, metrics: RequestMetrics, sequences: int) -> None:
        """A request got tokens for so many sequences; with the first ones its prompt is done."""
        self.generation_tokens += sequences
        if not metrics.steps:
            self.prompt_tokens += metrics.prompt_tokens

    def note_request(self, output: RequestOutput, stats: RequestStats | None) -> None:
        """Count a request that is over."""
        metrics = output.metrics
        if metrics.scheduled_s is not None:
            self.prefix_queries += metrics.prompt_tokens
            self.prefix_hits += metrics.cached_tokens
        if stats is not None:
            self.resumed_hits += stats.resumed_hit_tokens
            self.swaps += stats.swaps
        reasons = [one.finish_reason for one in output.outputs] or ["error" if output.error else "abort"]
        self.finished[str(reasons[0])] += 1


Prompt = str | Sequence[int]


class Engine:
    """A model with its KV pool behind a continuous-batching scheduler; not safe for several threads at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        draft: LoadedModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded, self.options, self.tokenizer = loaded, options or EngineOptions(), tokenizer
        parts = build_parts(loaded, self.options, draft, clock)
        self.limits, self.capacity = parts.limits, parts.capacity
        self.scheduler, self.runner = parts.scheduler, parts.runner
        options = self.options
        self._speculation = (
            Speculation(options.draft_tokens, SpeculationMode(options.draft_mode)) if draft else None
        )
        self.counters = EngineCounters()
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}
        self._by_number: dict[int, Ticket] = {}
        self._watched: dict[int, Ticket] = {}  # those whose text decides when they end
        self._next = 0
        self._epoch = 0  # part of every block's name: content of an earlier epoch is not trusted
        self._last: list[RequestOutput] = []  # of requests that ended outside of a step

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._tickets or self._last)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> None:
        """Queue a prompt, as text or as token ids, under a name that no live request has.

        Raises RequestError (of its kinds ParamsError, PromptError, TokenizerError) or NeverFitsError; nothing is
        queued then.
        """
        params = params or SamplingParams()
        if request_id in self._tickets:
            raise RequestError(f"a request named {request_id!r} is under way already")
        ids = token_ids_of(prompt, self.tokenizer)
        most = check_prompt(ids, params, self.loaded, self.limits)
        array, number = np.array(ids, dtype=np.int64), self._next
        salt = f"epoch {self._epoch}" if self._epoch else ""
        identity = TokenIdentity(
            number, array, salt, algorithm=self.options.hash, share_outputs=params.beam_width == 1
        )
        request = Request(number, len(ids), most, params.width, params.decoding, identity, priority,
            self._speculation if params.width == 1 else None)  # fmt: skip
        self.scheduler.submit(request)
        self._next += 1
        self.runner.add(request, array, params.rules(self.loaded.end_ids))
        now = self._clock() if arrival_s is None else arrival_s
        self._file(
            Ticket(
                request_id,
                number,
                prompt if isinstance(prompt, str) else None,
                ids,
                params,
                self.runner.generation(number),
                identity,
                self.tokenizer if params.detokenize else None,
                RequestMetrics(now, prompt_tokens=len(ids)),
            )
        )

    def _file(self, ticket: Ticket) -> None:
        self._tickets[ticket.request_id] = self._by_number[ticket.number] = ticket
        if ticket.params.stops:
            self._watched[ticket.number] = ticket

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; its blocks return. False if no such request is under way."""
        ticket = self._tickets.get(request_id)
        if ticket is None:
            return False
        self.scheduler.abort(ticket.number)
        self._last.append(self._close(ticket, "abort"))
        return True

    # -- a step --------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step and return the news of every request that has some."""
        outputs, self._last = self._last, []
        if not self.scheduler.has_work:
            return outputs
        plan = self.scheduler.schedule()
        self._note_admitted(plan)
        try:
            result, _ = self.runner.execute(plan)
        except (AuditError, CoreError):
            raise  # the books are wrong: nothing may be served on them
        except Exception as error:  # whatever else a step's work raises ends this step's requests alone
            return outputs + self._fail_step(plan, error)
        result = self._apply_stops(result)
        report = self.scheduler.commit(plan, result)
        self.counters.note_step(plan, report)
        return outputs + self._tell(report)

    def _note_admitted(self, plan: StepPlan) -> None:
        now = self._clock()
        for number in plan.admitted:
            metrics = self._by_number[number].metrics
            if metrics.scheduled_s is None:
                metrics.scheduled_s = now
                metrics.cached_tokens = self.scheduler.stats[number].hit_tokens

    def _apply_stops(self, result: StepResult) -> StepResult:
        """Sequences that have just said a stop string are over too, and requests whose text cannot be made."""
        over, ended = set(result.finished), dict(result.ended)
        for number, ticket in self._watched.items():
            if number in over:
                continue
            before = ticket.generation.ended_branches
            self._read(ticket)
            stopped = ticket.generation.ended_branches - before
            if ticket.generation.ended or ticket.error is not None:
                over.add(number)
            elif stopped:
                ended[number] = sorted({*ended.get(number, ()), *stopped})
        ended = {number: branches for number, branches in ended.items() if number not in over}
        return replace(result, finished=frozenset(over), ended=ended) if self._watched else result

    def _tell(self, report: CommitReport) -> list[RequestOutput]:
        now, done, outputs = self._clock(), set(report.finished), []
        for number in report.emitted:
            ticket = self._by_number[number]
            metrics = ticket.metrics
            self.counters.note_tokens(metrics, report.tokens.get(number, ticket.generation.growing))
            metrics.note_tokens(now)
            ticket.name_outputs(self.capacity.block_size)
            if number in done:
                continue
            if ticket.params.output_kind is not OutputKind.FINAL:
                self._read(ticket)
                outputs.append(ticket.output(finished=False))
        outputs.extend(self._close(self._by_number[number]) for number in report.finished)
        return outputs

    def _read(self, ticket: Ticket) -> None:
        """Make the ticket's text; a tokenizer that fails ends the request and nothing else."""
        try:
            ticket.read()
        except RequestError as error:
            ticket.error = ticket.error or error
            ticket.mute()
            self._watched[ticket.number] = ticket  # it ends with its next token

    def _last_output(self, ticket: Ticket, reason: FinishReason | None) -> RequestOutput:
        try:
            return ticket.output(finished=True, reason=reason)
        except RequestError as error:
            ticket.error = ticket.error or error
            ticket.mute()
            return ticket.output(finished=True, reason="error")

    def _close(self, ticket: Ticket, reason: FinishReason | None = None) -> RequestOutput:
        """The request's last output; all that the engine keeps of it is dropped."""
        number, metrics = ticket.number, ticket.metrics
        stats = self.scheduler.stats.pop(number, None)
        ticket.error = self.runner.failures.pop(number, None) or ticket.error
        if ticket.error is None and reason is None:
            self._read(ticket)
        if ticket.error is not None:
            reason = "error"
        metrics.finished_s = self._clock()
        lengths = [len(ids) for ids in ticket.generation.outputs()]
        metrics.output_tokens, metrics.longest = sum(lengths), max(lengths, default=0)
        if stats is not None:
            metrics.preemptions = stats.preemptions
            metrics.drafted_tokens, metrics.accepted_tokens = stats.drafted_tokens, stats.accepted_tokens
        output = self._last_output(ticket, reason)
        self.runner.forget(number)
        for book in (self._by_number, self._watched):
            book.pop(number, None)
        del self._tickets[ticket.request_id]
        if isinstance(ticket.error, RunError):
            self._epoch += 1
        self.counters.note_request(output, stats)
        return output

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        """A step that did not run: its requests end with an error, the books go on, the others too."""
        numbers = list(dict.fromkeys(row.request_id for row in plan.rows))
        unmoved = {number: range(self._by_number[number].params.width) for number in numbers}
        report = self.scheduler.commit(plan, StepResult(parents=unmoved, finished=frozenset(numbers)))
        reason = StepError(f"step {plan.step} with {len(numbers)} requests failed: {error}")
        outputs = []
        for number in numbers:
            if number not in report.finished:
                self.scheduler.abort(number)
            ticket = self._by_number[number]
            ticket.error = reason
            outputs.append(self._close(ticket, "error"))
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        return outputs

    def run(self) -> Iterable[RequestOutput]:
        """Step until nothing is under way."""
        while self.has_unfinished_requests:
            yield from self.step()

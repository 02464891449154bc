"""The record of a request that leaves: its life in five parts that add up."""

from __future__ import annotations

from policies.types import FinishReason, Request, RequestRecord, RequestState, Status


def record(
    state: RequestState, reason: FinishReason, detail: str, now: float, retry_after: float | None = None
) -> RequestRecord:
    """Fold a state into a record. queue + prefill + decode + stall + requeue is the whole of finish - arrival."""
    requeue = state.requeue_time + (now - state.waiting_since if state.status is Status.PREEMPTED else 0.0)
    queue, prefill, decode = _parts(state, state.stall_time + requeue, now)
    return RequestRecord(
        request_id=state.request_id,
        class_name=state.request.class_name,
        client_id=state.request.client_id,
        reason=reason,
        detail=detail,
        arrival_time=state.arrival_time,
        first_scheduled_time=state.first_scheduled_time,
        first_token_time=state.first_token_time,
        finish_time=now,
        queue_time=queue,
        prefill_time=prefill,
        decode_time=decode,
        stall_time=state.stall_time,
        requeue_time=requeue,
        num_prompt_tokens=state.num_prompt_tokens,
        num_cached_tokens=state.num_cached_tokens,
        num_output_tokens=state.num_output_tokens,
        num_recomputed_tokens=state.num_recomputed_tokens,
        num_preemptions=state.num_preemptions,
        token_spans=_spans(state),
        retry_after=retry_after,
    )


def _spans(state: RequestState) -> tuple[tuple[int, int], ...]:
    """(first step, number of tokens) of each run of steps that gave one token each."""
    starts = state.token_spans
    if not starts:
        return ()
    ends = [before for _, before in starts[1:]] + [state.num_output_tokens]
    return tuple((step, end - before) for (step, before), end in zip(starts, ends, strict=True))


def _parts(state: RequestState, lost: float, now: float) -> tuple[float, float, float]:
    if state.first_scheduled_time is None:
        return now - state.arrival_time, 0.0, 0.0
    queue = state.first_scheduled_time - state.arrival_time
    served = now - state.first_scheduled_time - lost
    if state.first_token_time is None:
        return queue, served, 0.0
    return queue, state.prefill_time, served - state.prefill_time


def rejection(request: Request, reason: str, now: float, retry_after: float | None = None) -> RequestRecord:
    """The record of a request that never entered."""
    return RequestRecord(
        request_id=request.request_id,
        class_name=request.class_name,
        client_id=request.client_id,
        reason=FinishReason.REJECTED,
        detail=reason,
        arrival_time=request.arrival_time,
        first_scheduled_time=None,
        first_token_time=None,
        finish_time=now,
        queue_time=now - request.arrival_time,
        prefill_time=0.0,
        decode_time=0.0,
        stall_time=0.0,
        requeue_time=0.0,
        num_prompt_tokens=request.prompt.num_tokens,
        num_cached_tokens=0,
        num_output_tokens=0,
        num_recomputed_tokens=0,
        num_preemptions=0,
        retry_after=retry_after,
    )

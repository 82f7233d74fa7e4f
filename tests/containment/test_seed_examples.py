"""The two examples that the requirement gives, unchanged but for their imports, and the names it lists."""

from __future__ import annotations

import dataclasses

import pytest

from treenail.containment import (
    ChainMetadata,
    ContextSnapshot,
    ExecutionConfig,
    ExecutionContext,
    NodeRecord,
    PolicyContext,
    PolicyDecision,
    SafetyEvent,
    ToolCallContext,
    WrapOptions,
)


def test_example_1_a_single_request_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """A single call is made, charged its hint, and counted as a step."""
    from treenail.containment import (
        ChainMetadata,
        Decision,
        ExecutionConfig,
        ExecutionContext,
        ShieldPipeline,
        WrapOptions,
    )

    def call_llm(prompt: str) -> str:
        return f"summary of {prompt}"

    config = ExecutionConfig(
        max_cost_usd=0.50,
        max_steps=10,
        max_retries_total=3,
        timeout_ms=15_000,
    )

    meta = ChainMetadata(
        request_id="req-001",
        chain_id="chain-001",
        org_id="acme",
        team="ml-platform",
        service="summariser",
        user_id="user-42",
        model="gpt-4o",
        tags={"env": "prod"},
    )

    pipeline = ShieldPipeline()  # configure hooks as needed

    with ExecutionContext(config=config, pipeline=pipeline, metadata=meta) as ctx:
        decision = ctx.wrap_llm_call(
            fn=lambda: call_llm(prompt="Summarise this document."),
            options=WrapOptions(operation_name="summarise", cost_estimate_hint=0.02),
        )
        if decision != Decision.ALLOW:
            print(f"Call blocked: {decision}")

    snap = ctx.get_snapshot()
    print(f"Total cost: ${snap.cost_usd_accumulated:.4f}, steps: {snap.step_count}")
    assert capsys.readouterr().out == "Total cost: $0.0200, steps: 1\n"


def test_example_2_an_agent_loop_with_a_step_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """The loop is ended by the configuration at step 20, not by its range."""
    from treenail.containment import Decision, ExecutionConfig, ExecutionContext, WrapOptions

    done: list[int] = []
    agent_step = done.append
    processed: list[int] = []
    process_result = processed.append

    config = ExecutionConfig(
        max_cost_usd=2.00,
        max_steps=20,
        max_retries_total=5,
        timeout_ms=60_000,
    )

    ctx = ExecutionContext(config=config)

    try:
        for step in range(100):  # Loop is bounded by ExecutionConfig, not the range
            decision = ctx.wrap_llm_call(
                fn=lambda: agent_step(step),  # noqa: B023 - as the example has it
                options=WrapOptions(operation_name=f"agent_step_{step}"),
            )
            if decision == Decision.HALT:
                snap = ctx.get_snapshot()
                print(
                    f"Chain halted at step {snap.step_count}: "
                    f"last event={snap.events[-1].event_type if snap.events else 'none'}"
                )
                break
            process_result(step)
    finally:
        snap = ctx.get_snapshot()
        print(f"Final: steps={snap.step_count}, cost=${snap.cost_usd_accumulated:.4f}")
    assert capsys.readouterr().out == (
        "Chain halted at step 20: last event=step_limit_exceeded\nFinal: steps=20, cost=$0.0000\n"
    )
    assert done == processed == list(range(20))


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (ChainMetadata, "request_id chain_id org_id team service user_id model tags"),
        (ExecutionConfig, "max_cost_usd max_steps max_retries_total timeout_ms"),
        (
            WrapOptions,
            "operation_name cost_estimate_hint timeout_ms retry_policy_override model response_hint "
            "partial_buffer reconciliation_callback",
        ),
        (
            NodeRecord,
            "node_id parent_id kind operation_name start_ts end_ts status cost_usd retries_used",
        ),
        (
            ContextSnapshot,
            "chain_id request_id step_count cost_usd_accumulated retries_used aborted abort_reason "
            "elapsed_ms nodes events graph_summary parent_chain_id agent_identity policy_metadata",
        ),
        (
            ToolCallContext,
            "request_id user_id session_id tool_name model endpoint tokens_in tokens_out cost_usd metadata",
        ),
        (SafetyEvent, "event_type decision reason hook request_id ts metadata envelope"),
        (PolicyContext, "cost_usd step_count entity_id chain_id timestamp metadata"),
        (
            PolicyDecision,
            "allowed policy_type reason partial_result degradation_action fallback_model rate_limit_ms "
            "envelope",
        ),
    ],
)
def test_the_records_have_the_fields_of_the_requirement(record: type, fields: str) -> None:
    """Each record has every field that is asked for, and is frozen."""
    present = {field.name for field in dataclasses.fields(record)}
    assert set(fields.split()) - present == set()
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]  # what dataclasses leave behind


def test_a_context_needs_only_ceilings() -> None:
    """Pipeline and metadata are optional, in that order after the ceilings; ids are made up."""
    ctx = ExecutionContext(ExecutionConfig(1.0, 5, 5, 0), None, None)
    assert ctx.get_snapshot().chain_id == ctx.get_snapshot().request_id != ""

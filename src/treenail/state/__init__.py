"""Typed state: sessions, snapshots, resources, budgets, and the root that owns them."""

from treenail.log.event import Channel, SlicePolicy
from treenail.state.budget import Budget, BudgetSnapshot, BudgetTracker, Deadline, TokenUsage
from treenail.state.checkpoints import CheckpointStore, ToolCheckpoint
from treenail.state.dispatch import (
    Dispatcher,
    DispatchResult,
    InProcessDispatcher,
    InProcessEventBus,
)
from treenail.state.events import (
    AttentionNeeded,
    AttentionResolved,
    ClearSlice,
    InitializeSlice,
    StateRestored,
    event,
    spec_of,
)
from treenail.state.execution import ExecutionState, rollback_to_tool
from treenail.state.resources import (
    Binding,
    Closeable,
    PostConstruct,
    ResourceContext,
    ResourceRegistry,
    Scope,
    Snapshotable,
)
from treenail.state.run_context import RunContext
from treenail.state.session import (
    Session,
    SessionSnapshotAdapter,
    iter_sessions_bottom_up,
    nested_session,
)
from treenail.state.slices import (
    Append,
    Clear,
    Extend,
    ReducerContext,
    Replace,
    Slice,
    SliceOp,
    append_all,
    reducer,
    replace_latest,
    replace_latest_by,
    upsert_by,
)
from treenail.state.snapshot import CompositeSnapshot, Snapshot, SnapshotMetadata, snapshots_equivalent
from treenail.state.transaction import Transaction, stamped
from treenail.state.views import SessionProtocol, SessionView

__all__ = [
    "Append",
    "AttentionNeeded",
    "AttentionResolved",
    "Binding",
    "Budget",
    "BudgetSnapshot",
    "BudgetTracker",
    "Channel",
    "CheckpointStore",
    "Clear",
    "ClearSlice",
    "Closeable",
    "CompositeSnapshot",
    "Deadline",
    "DispatchResult",
    "Dispatcher",
    "ExecutionState",
    "Extend",
    "InProcessDispatcher",
    "InProcessEventBus",
    "InitializeSlice",
    "PostConstruct",
    "ReducerContext",
    "Replace",
    "ResourceContext",
    "ResourceRegistry",
    "RunContext",
    "Scope",
    "Session",
    "SessionProtocol",
    "SessionSnapshotAdapter",
    "SessionView",
    "Slice",
    "SliceOp",
    "SlicePolicy",
    "Snapshot",
    "SnapshotMetadata",
    "Snapshotable",
    "StateRestored",
    "TokenUsage",
    "ToolCheckpoint",
    "Transaction",
    "append_all",
    "event",
    "iter_sessions_bottom_up",
    "nested_session",
    "reducer",
    "replace_latest",
    "replace_latest_by",
    "rollback_to_tool",
    "snapshots_equivalent",
    "spec_of",
    "stamped",
    "upsert_by",
]

from .agent import Agent as Agent
from .agent import Run as Run
from .codec import register_type as register_type
from .containment import Limits as Limits
from .errors import TreenailError as TreenailError
from .log import SlicePolicy as SlicePolicy
from .loop import MainLoop as MainLoop
from .prompt import MarkdownSection as MarkdownSection
from .prompt import Prompt as Prompt
from .state import Budget as Budget
from .state import CheckpointStore as CheckpointStore
from .state import Deadline as Deadline
from .state import ExecutionState as ExecutionState
from .state import ResourceRegistry as ResourceRegistry
from .state import Session as Session
from .state import Snapshot as Snapshot
from .state import event as event
from .state import reducer as reducer
from .tools import Tool as Tool
from .tools import ToolContext as ToolContext
from .tools import ToolResult as ToolResult
from .tools import tool as tool
from .turns import ModelAdapter as ModelAdapter
from .turns import TurnState as TurnState
from .workspace import Filesystem as Filesystem

__version__: str

from .transactions import Transactions as Transactions
from .transactions import current_context as current_context

from .bubblewrap import CommandLine as CommandLine
from .bubblewrap import confined as confined
from .policy import Grants as Grants
from .policy import Layer as Layer

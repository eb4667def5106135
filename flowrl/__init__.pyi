from flowrl.agent import load_agent as load_agent
from flowrl.api import evaluate as evaluate
from flowrl.api import status as status
from flowrl.api import train as train

__version__: str

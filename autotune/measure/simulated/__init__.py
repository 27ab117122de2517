"""A simulated machine in place of a real one: trial tables, simulated time, and trouble laid on top."""

from .clock import SimulatedClock as SimulatedClock
from .compilers import CompilingEvaluator as CompilingEvaluator
from .compilers import SimulatedCompilers as SimulatedCompilers
from .evaluator import ReplayEvaluator as ReplayEvaluator
from .first_calls import FirstCalls as FirstCalls
from .first_calls import Part as Part
from .first_calls import first_calls_of as first_calls_of
from .first_calls import parts_of as parts_of
from .tables import REPLAY_US as REPLAY_US
from .tables import Row as Row
from .tables import Table as Table
from .tables import TrueTime as TrueTime
from .tables import load_tables as load_tables
from .tables import save_tables as save_tables
from .tables import truth_of as truth_of
from .tables import with_graphs as with_graphs
from .trouble import QUIET as QUIET
from .trouble import Trouble as Trouble

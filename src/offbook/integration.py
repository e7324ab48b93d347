"""The names that an adapter to an agent framework may import, beside those of `offbook`.

- Capture: run the agent inside `capturing(trajectory)`. Send each model call with `call_headers(...)`, at the temperature
  of `forced_temperature()` and with at most `completion_limit()` tokens. `call_answered` notes that a call was answered, so
  that later logged rewards are credited to it; `logged_reward` is their sum. `LoopTransport` is an httpx transport
  for a client that several event loops share. `is_labelled` tells a recorded call from a request to another LLM,
  `is_app_file` the app's own source from that of packages. `on_capture_end` registers a callback that releases what a rollout holds.
- Tools: add each execution as a `ToolRun` to `Trajectory.tool_runs`.
- Observation: describe calls of the app's own models as `Call`s. `histories_of` turns them into conversations;
  `continues` tells whether one conversation begins with the messages of another.
- Rollouts: read a scenario with `scenario_id`, `scenario_fields` and `scenario_text`. `as_reward` turns the agent's return
  value into a reward, `as_rollout_exception` its exception into a record.
- Comparisons: options and results of `offbook.compare`, and `lines_of` a result. An `EndpointModel` answers at its
  `endpoint` in place of the trained model; its calls are outside of all captures (`is_outside`).
- Trace sinks: the events that an `offbook.TraceSink` receives, and rollouts as spans with fixed ids and times
  (`rollout_spans`), which `OtlpSender` sends. `DeliveryError`: a server did not accept them; they are delivered later.
  `RejectedError`: it refused some for good.
- Other LLMs: send requests with `Llm` inside `budget(max_cost)`, whose `Spending` is the ledger.
- Options: `check_options` and the decorator `names_checked` answer an unknown option with the right name and place.
- Text: `printable` and `one_line` escape text from outside for a terminal; `counted` writes a number and its noun.
- Training: options, results and the judge of `offbook.Trainer`, for signatures; `evaluation_line` for a page
  inside `printing_failures`; `run_sync` for sync twins of async methods; the errors that an adapter raises.
"""

from .app_files import is_app_file
from .client.capture import (
    call_answered,
    capturing,
    continues,
    histories_of,
    is_outside,
    logged_reward,
    on_capture_end,
)
from .client.endpoint_model import EndpointModel
from .client.sampling import BUNDLED, MAX_COMPLETION_TOKENS, completion_limit, forced_temperature
from .client.transport import LoopTransport
from .comparison.candidates import CandidateLike
from .comparison.commands import lines_of
from .comparison.options import CompareOptions, CompareSettings
from .comparison.results import ComparisonReport
from .contracts import (
    Alert,
    CheckpointSaved,
    EvaluationFinished,
    GroupsFinished,
    Judge,
    RunStarted,
    StepFinished,
    digest,
)
from .errors import (
    BudgetExceeded,
    CaptureError,
    ConfigError,
    LeakError,
    LlmError,
    MissingExtraError,
    RolloutError,
    SharedStateError,
)
from .listing import as_list
from .llms.ledger import Spending, budget
from .llms.llm import Llm
from .option_names import check_options, names_checked
from .plurals import counted
from .printable import one_line, printable
from .rewards.outcome import as_reward
from .scenarios.identity import scenario_fields, scenario_id, scenario_text
from .sync_calls import run_sync
from .tool_runs import ToolRun
from .tracing.json_text import json_text
from .tracing.names import resolve_sinks
from .tracing.otlp import Attribute, DeliveryError, OtlpSender, OtlpSpan, RejectedError
from .tracing.sampling_rate import checked_rate, is_sampled
from .tracing.spans import SpanKind, TraceSpan, rollout_spans, span_id, trace_id
from .trainer.evaluate import Evaluation, printing_failures
from .trainer.messages import evaluation_line
from .trainer.options import RunOptions, TrainerOptions
from .trainer.report import TrainReport
from .types import (
    CUT,
    Call,
    CallOrigin,
    CallOutput,
    CallStatus,
    CallTrace,
    Json,
    Message,
    Sampling,
    Tool,
    as_rollout_exception,
    new_id,
)
from .wire import RolloutTrace, call_headers, is_labelled

__all__ = [
    "BUNDLED",
    "CUT",
    "MAX_COMPLETION_TOKENS",
    "Alert",
    "Attribute",
    "BudgetExceeded",
    "Call",
    "CallOrigin",
    "CallOutput",
    "CallStatus",
    "CallTrace",
    "CandidateLike",
    "CaptureError",
    "CheckpointSaved",
    "CompareOptions",
    "CompareSettings",
    "ComparisonReport",
    "ConfigError",
    "DeliveryError",
    "EndpointModel",
    "Evaluation",
    "EvaluationFinished",
    "GroupsFinished",
    "Json",
    "Judge",
    "LeakError",
    "Llm",
    "LlmError",
    "LoopTransport",
    "Message",
    "MissingExtraError",
    "OtlpSender",
    "OtlpSpan",
    "RejectedError",
    "RolloutError",
    "RolloutTrace",
    "RunOptions",
    "RunStarted",
    "Sampling",
    "SharedStateError",
    "SpanKind",
    "Spending",
    "StepFinished",
    "Tool",
    "ToolRun",
    "TraceSpan",
    "TrainReport",
    "TrainerOptions",
    "as_list",
    "as_reward",
    "as_rollout_exception",
    "budget",
    "call_answered",
    "call_headers",
    "capturing",
    "check_options",
    "checked_rate",
    "completion_limit",
    "continues",
    "counted",
    "digest",
    "evaluation_line",
    "forced_temperature",
    "histories_of",
    "is_app_file",
    "is_labelled",
    "is_outside",
    "is_sampled",
    "json_text",
    "lines_of",
    "logged_reward",
    "names_checked",
    "new_id",
    "on_capture_end",
    "one_line",
    "printable",
    "printing_failures",
    "resolve_sinks",
    "rollout_spans",
    "run_sync",
    "scenario_fields",
    "scenario_id",
    "scenario_text",
    "span_id",
    "trace_id",
]

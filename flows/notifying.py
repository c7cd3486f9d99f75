"""Send messages about a run to people: a watcher that passes all events on, and sends messages about the events in the
recipe's ``notify``."""

from collections.abc import Iterator
from contextlib import contextmanager

from vantage.flows.messages import Message, Messenger
from vantage.runs.next_steps import after_questions
from vantage.runs.own_commands import own_command
from vantage.runs.record import StageRecord
from vantage.runs.run import Run
from vantage.runs.watching import Watcher
from vantage.schemas.recipe.notify import Notify, NotifyEvent
from vantage.schemas.records.approvals import PUBLISH_PREFIX
from vantage.schemas.safe_text import safe_text
from vantage.tasks.training.progress import StageProgress

_WORDS: dict[NotifyEvent, str] = {
    "gate_closed": "gate closed",
    "failed": "failed",
    "waiting_approval": "waits for approval",
}


@contextmanager
def notified(run: Run, watcher: Watcher) -> Iterator[Watcher]:
    """Yield the watcher of a run that this process is about to execute; at the end of the block, the run has ended."""
    notify = run.record.recipe.notify
    if notify is None:
        yield watcher
        return
    notifying = _Notifying(run, watcher, notify)
    try:
        yield notifying
    finally:
        notifying.run_ended()


class _Notifying:
    """A watcher that also sends messages."""

    def __init__(self, run: Run, watcher: Watcher, notify: Notify) -> None:
        self._run = run
        self._watcher = watcher
        self._notify = notify
        self._messenger = Messenger(notify.urls, lambda text: watcher.say(f"  {text}", "yellow"))
        self._computed: set[str] = set()
        self._fired: dict[str, int] = {}
        """Stage → number of firings of its guards that were sent."""
        self._is_news = notify.reused
        """Whether anything happened beyond the reuse of stored artifacts."""
        self._known = {question.id for question in run.record.questions.values()}
        self._waited = {
            step for step, stage in run.record.stages.items() if stage.status == "waiting_approval"
        }

    def say(self, text: str, style: str = "") -> None:
        self._watcher.say(text, style)

    def started(self, step: str, attempt: int) -> None:
        self._computed.add(step)
        self._watcher.started(step, attempt)

    def progressed(self, step: str, report: StageProgress) -> None:
        self._watcher.progressed(step, report)
        if len(report.firings) > self._fired.get(step, 0) and "gate_closed" in self._notify.on:
            new = report.firings[self._fired.get(step, 0) :]
            self._send(f"{step} guard fired", *new, self._status())
        self._fired[step] = max(len(report.firings), self._fired.get(step, 0))

    def ended(self, step: str, stage: StageRecord) -> None:
        self._watcher.ended(step, stage)
        self._is_news = self._is_news or step in self._computed or stage.status == "failed"
        if step in self._waited and stage.status != "waiting_approval":
            self._is_news = True  # a person has answered
        verdicts = "; ".join(str(verdict) for verdict in stage.verdicts if not verdict.passed)
        match stage.status:
            case "failed":
                self._tell("failed", step, stage.reason or "", self._resume())
            case "gate_closed" if step in self._computed or self._notify.reused:
                self._tell("gate_closed", step, verdicts, self._status())
            case "waiting_approval":
                self._ask(step)

    def run_ended(self) -> None:
        """Send the open questions and the run's end, and wait a limited time until they are sent."""
        record = self._run.record
        for subject in record.open_questions:
            if subject.startswith(PUBLISH_PREFIX):
                self._ask(subject)
        if self._is_news and "ended" in self._notify.on:
            counts = [
                f"{sum(stage.status == status for stage in record.stages.values())} {status.replace('_', ' ')}"
                for status in dict.fromkeys(stage.status for stage in record.stages.values())
            ]
            status = "broke off" if record.status == "running" else record.status.replace("_", " ")
            go_on = self._resume() if record.status in ("resumable", "failed") else self._status()
            self._send(f"ended: {status}", f"stages: {', '.join(counts)}", go_on)
        self._messenger.close()

    def _ask(self, subject: str) -> None:
        question = self._run.record.questions.get(subject)
        if question is None or (question.id in self._known and not self._notify.reused):
            return
        self._known.add(question.id)
        self._is_news = True
        about = "; ".join(str(verdict) for verdict in question.verdicts if not verdict.passed)
        only = self._run.record.model_copy(update={"questions": {subject: question}})
        self._tell("waiting_approval", subject, about, *after_questions(only, self._place)[1:])

    def _tell(self, event: NotifyEvent, subject: str, *lines: str) -> None:
        if event in self._notify.on:
            self._send(f"{subject} {_WORDS[event]}", *lines)

    def _send(self, what: str, *lines: str) -> None:
        record = self._run.record
        title = f"{record.recipe.recipe}: {what}"
        body = "\n".join([f"run {record.run_id}", *(line.strip() for line in lines if line)])
        self._messenger.send(Message(title=safe_text(title), body=safe_text(body)))

    @property
    def _place(self) -> str:
        return self._run.workspace.address

    def _resume(self) -> str:
        return f"go on with: {own_command('resume', self._run.record.run_id, '--workspace', self._place)}"

    def _status(self) -> str:
        return f"look at it: {own_command('status', self._run.record.run_id, '--workspace', self._place)}"

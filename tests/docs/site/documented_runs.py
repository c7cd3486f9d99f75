"""Run the commands of the pages on one finished run of fake stages; list those that are not run, each with the reason."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.site.documented_commands import commands, pages, refusal, words_of

COMPLETE = ("doctor", "gc", "schema", "status")
"""Commands of which a mention alone can be run."""
GROUPS = ("data inspect",)
"""Mentions of a command that belongs to a group; each is named without its arguments."""

DATA = "--set data.demonstrations.source=instructions.json --set data.preferences.source=pairs.json"

STAND_INS = {
    r"(?<=instruct )…": f"--set model.source=MODEL_FOLDER {DATA}",
    r"[\[\]]": "",
    r" > \S+$": "",
    r"\b(quickstart|asking|small|MODEL)@(champion|ALIAS)\b": "fake@champion",
    r"(?<=audit )[0-9a-f]{32}\b": "MLFLOW_RUN",
    r"(?<=audit )[0-9a-f]{8}\b": "DIGEST",
    r"(?<=critic )RUN/STAGE": "latest/policy",
    r"\bRUN/STAGE(\|MODEL)?": "latest/reward",
    r"\b(RUN|TARGET)\b": "latest",
    r"^(approve|reject) latest (STAGE|sft)\b": r"\1 latest value",
    r"\bSTAGE\b": "policy",
    r"\b(RECIPE|my\.yaml)(?= |$)": "recipe.yaml",
    r"^(plan|run) NAME$": r"\1 quickstart",
    r"\bA B\b": "1 2",
    r"^keys show FILE$": "keys show team.pem.pub",
    r"^keys new \S+": "keys new new.pem",
    r"(--key |sign\.key=)FILE\b": r"\1team.pem",
    r"(?<=--require-signature )KEY\b": "team.pem.pub",
    r"\brelease\.pem": "team.pem",
    r"^audit \S+ --require-signature team.pem.pub$": "audit fake@champion --require-signature team.pem.pub --decision-key ada.pem.pub",
    r"(?<=--to )FILE\b": "bill.json",
    r"(?<=inspect )FILE(?= --content labelled_responses)": "labelled.jsonl",
    r"^init FILE$": "init new --yes --model MODEL_FOLDER --prompts questions.jsonl",
    r"\bFILE\b": "questions.jsonl",
    r"\bLLAMA_7B\b": "MODEL_FOLDER",
    r"(?<=lora_7b )": "--set model.source=MODEL_FOLDER ",
    r"(?<=gsm8k_vapo )(?!--set)": "--set data.demonstrations.source=train.jsonl --set data.problems.source=train.jsonl ",
    r"(?<=gsm8k_vapo )": "--set model.source=MODEL_FOLDER ",
    r"\b(instruction-data|alpaca_zh_demo)\.json": "instructions.json",
    r"\b(instruction-data-with-preference|dpo_zh_demo|preferences)\.json": "pairs.json",
    r"\bgsm8k_train_3000\.jsonl": "train.jsonl",
    r"(?<=--workspace )(/data/rlhf|hacking)": "COPY",
}
"""Regular expression of a text in the pages → its replacement in the tests, in this order."""


@dataclass(frozen=True)
class Elsewhere:
    """Why a kind of command is not run here, and the file of tests that runs it."""

    reason: str
    tests: str


ELSEWHERE = {
    r"ui$": Elsewhere("serves pages until Ctrl-C", "cli/test_ui.py"),
    r"worker\b": Elsewhere("serves a work pool until Ctrl-C", "flows/pools/test_workers.py"),
    r"(undeploy|deployments)\b": Elsewhere("asks a Prefect server", "flows/pools/test_schedules.py"),
    r"sample\b": Elsewhere("samples from a real model", "cli/test_sample.py"),
    r"export .*--push": Elsewhere("sends a real model to a hub or a bucket", "cli/test_push.py"),
    r"export\b": Elsewhere("writes a real model", "cli/test_export.py"),
    r"audit (\./exported|FOLDER)": Elsewhere("reads a folder of a real model", "cli/test_export.py"),
    r"resume\b": Elsewhere("starts a Prefect server", "cli/test_main.py"),
    r"finish\b": Elsewhere("ends a stage that is under way", "flows/test_guarded_run.py"),
    r"data inspect FILE --model": Elsewhere("starts a process for the tokenizer", "cli/test_data.py"),
    r"(publish|rollback)\b": Elsewhere("moves an alias", "flows/publishing/test_moving_aliases.py"),
    r"sweep\b": Elsewhere("trains each arm", "flows/sweeps/test_sweep.py"),
    r".*s3://": Elsewhere("needs a bucket", "runs/test_bucket_workspace.py"),
}
"""The beginning of a command, as a regular expression → why it is not run here."""


def shown_commands() -> Iterator[str]:
    """Yield once each command that a page shows whole: lines of code blocks, and mentions that lack no argument."""
    found: dict[str, None] = {}
    for page in pages():
        for command, is_line in commands(page.read_text(encoding="utf-8")):
            has_words = len(words_of(command)) > 1 or command in COMPLETE
            if is_line or (has_words and command not in GROUPS and refusal(command, is_whole=True) is None):
                found[command] = None
    yield from found


def elsewhere(command: str) -> Elsewhere | None:
    """Return why a command is not run here; None: it is run."""
    return next((why for start, why in ELSEWHERE.items() if re.match(start, command)), None)


def command_here(command: str) -> str:
    """Return the command with the names of the scene.

    ``run`` would train: its recipe is planned with the same overrides. ``deploy`` only prints what it would register in Prefect.
    """
    for written, name in STAND_INS.items():
        command = re.sub(written, name, command)
    if command.startswith("run "):
        command = "plan " + command.removeprefix("run ").replace(" --detach", "")
    if command.startswith("deploy ") and "--dry-run" not in command:
        command += " --dry-run"
    return " ".join(command.split())

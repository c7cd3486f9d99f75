"""The command line, with one file a command."""

import sys

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.garbage import collect_rarely
from vantage.attempts.identity.inherited import forget_foreign_variables
from vantage.attempts.launchers.safe_stream import SafeStream
from vantage.cli.app import app
from vantage.cli.approve import approve, reject
from vantage.cli.audit import audit
from vantage.cli.cancel import cancel
from vantage.cli.critic import critic
from vantage.cli.data import data_app
from vantage.cli.deploy import deploy, deployments, undeploy
from vantage.cli.diff import diff
from vantage.cli.doctor import doctor
from vantage.cli.estimate import estimate
from vantage.cli.export import export
from vantage.cli.finish import finish
from vantage.cli.gc import gc
from vantage.cli.helpful_command import HelpfulCommand
from vantage.cli.init import init
from vantage.cli.keys import keys_app
from vantage.cli.logs import logs
from vantage.cli.output import warn
from vantage.cli.plan import plan
from vantage.cli.publish import publish, rollback
from vantage.cli.report import report
from vantage.cli.resume import resume
from vantage.cli.run import run
from vantage.cli.sample import sample
from vantage.cli.sbom import sbom
from vantage.cli.schema import schema
from vantage.cli.sign import sign
from vantage.cli.status import status
from vantage.cli.sweep import sweep
from vantage.cli.ui import ui
from vantage.cli.worker import worker
from vantage.runs.shown_warnings import warnings_shown

GROUPS = {
    "Run a recipe": (init, plan, estimate, run, resume, cancel, finish, sweep),
    "Look at runs": (status, logs, report, ui, diff, critic),
    "Use a model": (sample, export),
    "Decide": (approve, reject, publish, rollback),
    "Prove": (audit, sbom, sign),
    "Schedules and workers": (deploy, deployments, undeploy, worker),
    "This machine": (doctor, gc, schema),
}
"""Heading in ``vantage --help`` → its commands, in the order in which they are used."""

for heading, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=heading, cls=HelpfulCommand)(command)
app.add_typer(data_app, name="data", rich_help_panel="Run a recipe")
app.add_typer(keys_app, name="keys", rich_help_panel="Prove")


def main() -> None:
    """Run the console script."""
    if sys.flags.optimize:  # multiprocessing passes the flag on to the processes of stages
        print(
            "vantage: PYTHONOPTIMIZE (or python -O) takes the checks out of the code that stages compute with; unset it",
            file=sys.stderr,
        )
        sys.exit(ExitCode.BAD_INPUT)
    collect_rarely()
    forget_foreign_variables()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop a run
    sys.stderr = SafeStream(sys.stderr)  # messages contain texts of users and servers
    with warnings_shown(lambda text: warn([text])):
        app()

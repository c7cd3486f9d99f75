"""The command line, with one file a command."""

import sys

from flows.commands.app import app
from flows.commands.approve import approve, reject
from flows.commands.audit import audit
from flows.commands.cancel import cancel
from flows.commands.critic import critic
from flows.commands.data import data_app
from flows.commands.deploy import deploy, deployments, undeploy
from flows.commands.diff import diff
from flows.commands.doctor import doctor
from flows.commands.estimate import estimate
from flows.commands.export import export
from flows.commands.gc import gc
from flows.commands.init import init
from flows.commands.keys import keys_app
from flows.commands.logs import logs
from flows.commands.plan import plan
from flows.commands.publish import publish, rollback
from flows.commands.report import report
from flows.commands.resume import resume
from flows.commands.run import run
from flows.commands.sample import sample
from flows.commands.sbom import sbom
from flows.commands.schema import schema
from flows.commands.sign import sign
from flows.commands.status import status
from flows.commands.sweep import sweep
from flows.commands.worker import worker
from flows.garbage import collect_rarely
from flows.launchers.safe_stream import SafeStream

for command in (
    init,
    run,
    plan,
    estimate,
    resume,
    approve,
    reject,
    publish,
    rollback,
    sweep,
    status,
    report,
    diff,
    critic,
    sample,
    export,
    sbom,
    sign,
    audit,
    logs,
    cancel,
    gc,
    deploy,
    deployments,
    undeploy,
    worker,
    schema,
    doctor,
):
    app.command()(command)
app.add_typer(data_app, name="data")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """The console script."""
    collect_rarely()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop a run
    sys.stderr = SafeStream(sys.stderr)  # messages contain texts of users and servers
    app()

"""Sign artifacts: one step of a run when it ends, or everything from which a model was made."""

from collections.abc import Collection
from dataclasses import dataclass

from vantage.runs.contradictions import contradictions
from vantage.runs.named_models import DamagedModel
from vantage.runs.record import RunRecord
from vantage.runs.workspace import Workspace
from vantage.signing.bundles import problem_of, sign
from vantage.signing.keys import SigningKey
from vantage.signing.lineage import refs_of
from vantage.signing.statements import files_in, judged_by, statement
from vantage.storage.refs import Ref
from vantage.storage.signatures import add_signature, place_of, read_signatures, read_stored_manifest
from vantage.storage.storage import Readable, Storage


@dataclass(frozen=True)
class Signed:
    """A signed artifact."""

    step: str
    digest: str
    key_id: str
    place: str
    """Folder or address with the statements of this key."""
    is_new: bool
    """Whether the signature is new; False: the same statement had been signed with this key before."""


def sign_step(workspace: Workspace, record: RunRecord, step: str, key: SigningKey) -> Signed:
    """Sign the artifact of one step; its files were hashed when it was made or looked up.

    Raises:
        NotStored: the store has another artifact than the record names.
        DamagedModel: the artifact's manifest does not match its digest.
        OSError, ValueError: the key, the disk or the bucket fails.
    """
    ref = refs_of(workspace, record, [step])[step]
    return _sign(record, step, ref, workspace.storage, key)


def sign_all(
    workspace: Workspace, record: RunRecord, steps: Collection[str], key: SigningKey
) -> list[Signed]:
    """Sign the artifacts of these steps, after reading every byte of them and comparing them with the run's record.

    Raises:
        NotStored: as ``sign_step``.
        DamagedModel: files differ from a manifest, or the record from the artifact's metrics. Then nothing is signed.
    """
    storage = workspace.storage
    refs = refs_of(workspace, record, steps)
    differing = contradictions(workspace, record)
    if differing:
        raise DamagedModel(
            f"run {record.run_id} is not signed: its record differs from its artifacts: {'; '.join(differing)}; "
            "run the recipe again, which records anew"
        )
    for step, ref in refs.items():
        problems = storage.verify(ref.artifact)
        if problems:
            raise DamagedModel(
                f"{step} of run {record.run_id} is damaged, and nothing is signed: {'; '.join(problems)}; "
                "run the recipe again, which makes it anew"
            )
    return [_sign(record, step, ref, storage, key) for step, ref in refs.items()]


def statement_of(storage: Readable, record: RunRecord, step: str, ref: Ref) -> bytes:
    """Return the statement about the artifact of a step, from the present store. Raises DamagedModel if its manifest is
    damaged."""
    digest = ref.artifact.digest
    try:
        files = files_in(read_stored_manifest(storage, digest) or b"", digest=digest)
    except ValueError as error:
        raise DamagedModel(
            f"{step} of run {record.run_id} is damaged ({error}); run the recipe again"
        ) from error
    return statement(ref, files, judged_by(record, step))


def _sign(record: RunRecord, step: str, ref: Ref, storage: Storage, key: SigningKey) -> Signed:
    digest, stage_key = ref.artifact.digest, ref.artifact.stage_key
    said = statement_of(storage, record, step, ref)
    pem = key.public.pem
    assert pem is not None, "of a private key"
    is_new = not any(
        (each.key_id, each.statement, each.public_key) == (key.public.key_id, said, pem)
        and problem_of(said, each.signature, pem) is None
        for each in read_signatures(storage, stage_key)
    )
    if is_new:
        add_signature(
            storage,
            stage_key,
            key_id=key.public.key_id,
            public_key=pem,
            statement=said,
            signature=sign(said, key),
        )
    return Signed(step, digest, key.public.key_id, place_of(storage, stage_key, key.public.key_id), is_new)

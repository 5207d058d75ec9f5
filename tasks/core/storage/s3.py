"""A bucket of an S3-compatible store. The only file that knows S3, what its errors mean, and which of them pass.

botocore sends a single request, or a part of a large file, again at once and a few times. The layer here does a whole operation again, later and more
patiently, and also where an answer was cut off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import boto3
from boto3.exceptions import Boto3Error, S3UploadFailedError
from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from s3transfer.exceptions import RetriesExceededError
from tenacity import (
    AttemptManager,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential_jitter,
)
from urllib3.exceptions import HTTPError

from configs.errors import DataError, StorageRefused, StorageUnavailable
from tasks.core.storage.files import appearing

log = logging.getLogger("ratchet")

# Waits of about 0.5, 1.5, 4.5, 13.5 and 20 seconds, 45 at most in all: a store that restarts is outlasted.
ATTEMPTS = 6
FIRST_WAIT, WAIT_GROWTH, LONGEST_WAIT, JITTER = 0.5, 3, 20.0, 1.0  # seconds, but for the growth
NO_NEW_ATTEMPT_AFTER = (
    900.0  # seconds; a store that accepts requests and never answers uses up all timeouts of an attempt
)

CONNECT_TIMEOUT = 5  # seconds
REQUEST_ATTEMPTS = 5  # botocore's own, per request

NO_OBJECT = ("NoSuchKey", "404")
DAMAGED_CODES = {"BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}  # on the way up
PASSING_CODES = DAMAGED_CODES | {
    # The store is busy, or an error within a 200.
    *(
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
    ),
    # Another writer, or an earlier try of ours whose answer was lost, came in between.
    *("OperationAborted", "NoSuchUpload", "PreconditionFailed"),
}
PASSING_ERRORS = (
    # ConnectionError and HTTPClientError are timeouts, resets and refusals; the next three are bodies that are cut off, unreadable or wrong.
    *(
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        ResponseParserError,
        exceptions.FlexibleChecksumError,
    ),
    # Bodies of error answers are read outside of botocore's translation.
    *(HTTPError, ConnectionError, TimeoutError),
)


def passes(error: BaseException) -> bool:
    """Whether an error of the S3 client may be gone at the next try: the one place that decides it."""
    error = _cause(error)
    if not isinstance(error, ClientError):
        return isinstance(error, PASSING_ERRORS)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return _code(error) in PASSING_CODES or status == 429 or (status >= 500 and status != 501)


class S3Store:
    """A bucket of an S3-compatible store; endpoint, region and credentials come from the environment, as boto3 reads them."""

    def __init__(self, root: str, timeout_seconds: float = 60):
        self.root = root
        self.bucket, _, prefix = root.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        # Path addressing: compatible stores on an address of their own have no bucket host names.
        embedded = bool(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
        config = Config(
            retries={"total_max_attempts": REQUEST_ATTEMPTS, "mode": "standard"},
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=timeout_seconds,
            # Every body is signed with its SHA-256, over https too, and the server refuses another one. botocore's CRC-32 on top, which many
            # compatible stores do not know, or an MD5, which costs twice as much, would find nothing more.
            s3={"addressing_style": "path" if embedded else "auto", "payload_signing_enabled": True},
            request_checksum_calculation="when_required",
        )
        self.client = boto3.session.Session().client("s3", config=config)
        for operation in ("PutObject", "UploadPart"):
            self.client.meta.events.register(f"needs-retry.s3.{operation}", _send_again_if_damaged)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error, RetriesExceededError, *PASSING_ERRORS) as error:
            here = f"storage.root is {self.root} and the S3 store at {self.client.meta.endpoint_url}"
            remedy = "check AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            if passes(error):
                raise StorageUnavailable(
                    f"{here} does not serve it ({_reason(error)}): start it (`ratchet up`), or {remedy}"
                ) from error
            raise StorageRefused(
                f"{here} refuses it ({_reason(error)}): {remedy}, and that the bucket is there and theirs"
            ) from error

    def _attempts(self, operation: str, key: str) -> Iterator[AttemptManager]:
        """Tries for one operation, each to be entered with `with`, until one succeeds, an error does not pass, or the limits are reached."""

        def warn(state: RetryCallState) -> None:
            reason = _reason(state.outcome.exception())
            log.warning(
                "%s %s failed (%s): attempt %d of %d in %.1f s",
                operation,
                key,
                reason,
                state.attempt_number + 1,
                ATTEMPTS,
                state.next_action.sleep,
            )

        with self._translated():
            yield from Retrying(
                retry=retry_if_exception(passes),
                wait=wait_exponential_jitter(
                    multiplier=FIRST_WAIT, exp_base=WAIT_GROWTH, max=LONGEST_WAIT, jitter=JITTER
                ),
                stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(NO_NEW_ATTEMPT_AFTER),
                before_sleep=warn,
                reraise=True,
            )

    def check(self) -> None:
        # Botocore's own tries alone: that nothing listens is to be known within seconds.
        with self._translated():
            try:
                self.client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
                self._create_bucket()

    def _create_bucket(self) -> None:
        region = self.client.meta.region_name
        where = {} if region in (None, "us-east-1") else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        try:
            self.client.create_bucket(Bucket=self.bucket, **where)
        except ClientError as error:
            # Another run was faster, or the answer to our first try was lost.
            if _code(error) != "BucketAlreadyOwnedByYou":
                raise

    def list(self, prefix: str = "") -> dict[str, int]:
        for attempt in self._attempts("listing", self.uri(prefix)):
            with attempt:
                pages = self.client.get_paginator("list_objects_v2").paginate(
                    Bucket=self.bucket, Prefix=self.prefix + prefix
                )
                return {
                    o["Key"].removeprefix(self.prefix): o["Size"] for page in pages for o in page.get("Contents", [])
                }

    def newest(self, prefix: str) -> datetime | None:
        for attempt in self._attempts("listing", self.uri(prefix)):
            with attempt:
                pages = self.client.get_paginator("list_objects_v2").paginate(
                    Bucket=self.bucket, Prefix=self.prefix + prefix
                )
                return max((o["LastModified"] for page in pages for o in page.get("Contents", [])), default=None)

    def get_bytes(self, key: str) -> bytes | None:
        for attempt in self._attempts("reading", self.uri(key)):
            with attempt:
                try:
                    # Read whole, a body is compared with its Content-Length.
                    return self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()
                except ClientError as error:
                    if _code(error) not in NO_OBJECT:
                        raise
                    return None

    def put_bytes(self, key: str, data: bytes) -> None:
        for attempt in self._attempts("writing", self.uri(key)):
            with attempt:
                self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def get_file(self, key: str, path: Path) -> None:
        for attempt in self._attempts("downloading", self.uri(key)):
            with attempt, appearing(path) as part, part.open("wb") as file:
                try:
                    self.client.download_fileobj(self.bucket, self.prefix + key, file)
                except ClientError as error:
                    if _code(error) in NO_OBJECT:
                        raise DataError(f"{self.uri(key)} does not exist: check the address") from None
                    raise

    def put_file(self, path: Path, key: str) -> None:
        for attempt in self._attempts("uploading", self.uri(key)):
            with attempt:
                self.client.upload_file(str(path), self.bucket, self.prefix + key)

    def delete(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 1000):
            batch = keys[start : start + 1000]
            for attempt in self._attempts("deleting", f"{self.uri(batch[0])} and {len(batch) - 1} more"):
                with attempt:
                    objects = [{"Key": self.prefix + key} for key in batch]
                    answer = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
                    # Objects that could not be removed are named within a success.
                    for failed in answer.get("Errors", []):
                        raise ClientError({"Error": failed}, "DeleteObjects")

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"


def _send_again_if_damaged(response: tuple | None, attempts: int, **_) -> float | None:
    """botocore's question whether to send a request again, and after how many seconds: one damaged part must not cost a whole large file."""
    damaged = response is not None and response[1].get("Error", {}).get("Code") in DAMAGED_CODES
    return 0.1 * attempts if damaged and attempts < REQUEST_ATTEMPTS else None


def _code(error: ClientError) -> str | None:
    return error.response.get("Error", {}).get("Code")


def _cause(error: BaseException) -> BaseException:
    """What an error of boto3's transfer manager stands for; any other error itself."""
    if isinstance(error, RetriesExceededError):
        return error.last_exception
    return error.__context__ if isinstance(error, S3UploadFailedError) and error.__context__ else error


def _reason(error: BaseException) -> str:
    """An error's text in one line."""
    return " ".join(str(_cause(error)).split()) or type(error).__name__

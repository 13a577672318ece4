"""The agreement between the operator's mode and the Framework CRD that the API server has.

The two modes store the status in different ways, and the API server reports no error to an operator of the wrong one:
it drops a status that comes with the main resource when the CRD has a status subresource. An operator that went on
would act on facts that no successor finds, and the successor would run the job again. So the agreement is reached
before the first sync, and kept: the operator asks the API server every few seconds, and at once when a status was not
kept (`doubt`). While there is a problem, no Framework is synced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from controllers.framework.constants import FRAMEWORKS
from controllers.framework.crd import CRD_NAME, Mode, crd
from store.kube.api import KubeApi
from store.kube.errors import AlreadyExists, Forbidden, KubeError
from store.kube.resources import CUSTOM_RESOURCE_DEFINITIONS, Resource

log = structlog.get_logger(__name__)

RETRY = 1.0  # seconds between two looks while there is a problem
CHECK = 5.0  # seconds between two looks while there is none
STATUS_SUBRESOURCE = Resource(FRAMEWORKS.group, FRAMEWORKS.version, "frameworks/status", FRAMEWORKS.kind)


class Agreement:
    """`problem`: what is wrong, "" while the CRD fits. `restored` is called after each look that found so."""

    def __init__(self, api: KubeApi, mode: Mode, restored: Callable[[], None]) -> None:
        self.problem = "the operator has not started"
        self._api, self._mode, self._restored = api, mode, restored
        self._doubted = asyncio.Event()

    async def reach(self) -> None:
        """Wait until the API server serves Frameworks in our mode; create the CRD where that is allowed."""
        while self.problem:
            await self._look(may_create=True)
            if self.problem:
                await asyncio.sleep(RETRY)

    async def keep(self) -> None:
        """Look again and again, until cancelled. A CRD that was removed is not created again."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY if self.problem else CHECK):
                    await self._doubted.wait()
            self._doubted.clear()
            had_problem = bool(self.problem)
            await self._look(may_create=False)
            if not self.problem:
                if had_problem:
                    log.info("The Framework CRD fits again", name=CRD_NAME, mode=self._mode)
                self._restored()

    def doubt(self, why: str) -> None:
        """Sync no Framework until the API server was asked."""
        self.problem = self.problem or why
        self._doubted.set()

    async def _look(self, *, may_create: bool) -> None:
        try:
            problem = await self._find_problem(may_create=may_create)
        except KubeError as error:
            if not may_create and not self.problem:
                return  # the API server is away: nothing is known of a change, and nothing can be stored either
            problem = f"the API server can't be asked for the Framework CRD: {error}"
        if problem and problem != self.problem:
            log.warning("Frameworks can't be run", reason=problem)
        self.problem = problem

    async def _find_problem(self, *, may_create: bool) -> str:
        if not await self._api.served(FRAMEWORKS, fresh=True):
            if may_create:
                await self._create_crd()
            if not may_create or not await self._api.served(FRAMEWORKS, fresh=True):
                return f"the API server does not serve {CRD_NAME}; if that lasts, apply deploy/kubernetes/crd.yaml"
        has_subresource = await self._api.served(STATUS_SUBRESOURCE, fresh=True)
        if has_subresource == (self._mode == "native"):
            return ""
        other = "native" if has_subresource else "compatible"
        return (
            f"the installed CRD {CRD_NAME} is for {other} mode, and this operator is set to {self._mode} mode: change "
            "the setting, or apply the other CRD"
        )

    async def _create_crd(self) -> None:
        try:
            await self._api.create(CUSTOM_RESOURCE_DEFINITIONS, crd(self._mode))
        except AlreadyExists:
            return
        except Forbidden as error:
            raise Forbidden(
                f"the CRD {CRD_NAME} is not installed, and this operator may not create it; apply "
                f"deploy/kubernetes/crd.yaml ({error})",
                status=error.status,
            ) from error
        log.info("Created the CRD", name=CRD_NAME, mode=self._mode)

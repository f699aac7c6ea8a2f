"""``kubectl``, as the user has it: its own settings say which cluster and who asks. Nothing of them is read here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from phalanx.errors import RunError
from phalanx.launch.targets.offer import ask_program

_PATIENCE = 60.0  # seconds for an answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubectl:
    """Commands to one cluster.

    Attributes:
        context: of the user's settings; empty: the one they name.
        namespace: empty: the context's.
    """

    context: str = ""
    namespace: str = ""

    def words(self, *words: str) -> tuple[str, ...]:
        """The whole command."""
        context = ("--context", self.context) if self.context else ()
        namespace = ("--namespace", self.namespace) if self.namespace else ()
        return ("kubectl", *context, *namespace, *words)

    def ask(self, *words: str, text: str | None = None, patience: float = _PATIENCE) -> str:
        """What the command prints, within ``patience`` seconds. ``text``: what it reads.

        Raises:
            RunError: it refuses, in its own words; does not answer; or is not on this machine.
        """
        command = self.words(*words)
        given = {} if text is None else {"stdin": None, "input": text}
        lacking = "a machine that has it; --dry-run shows the manifests to take there"
        done = ask_program(command, "Kubernetes", patience, lacking, "kubectl cluster-info", **given)
        if done.returncode:
            said = (done.stderr or done.stdout).strip() or f"kubectl ended with {done.returncode}"
            raise RunError(f"Kubernetes refuses it: {said}\n    try: {_what_helps(said)}")
        return done.stdout

    def objects(self, kind: str, *words: str) -> list[dict[str, Any]]:
        """The objects of a kind that a name or a selector leads to; none where there are none.

        Raises:
            RunError: as of ``ask``.
        """
        told = self.ask("get", kind, *words, "--ignore-not-found", "--output", "json")
        found = json.loads(told) if told.strip() else {"items": []}
        return found.get("items", [found])

    def settled(self) -> Kubectl:
        """The same, with the context and the namespace of the user's settings now: later they may name others."""
        try:
            context = self.context or Kubectl().ask("config", "current-context").strip()
            view = ("config", "view", "--minify", "--output", "jsonpath={..namespace}")
            namespace = self.namespace or Kubectl(context=context).ask(*view).strip()
        except RunError:  # in a pod there are none
            return self
        return Kubectl(context=context, namespace=namespace)


def _what_helps(said: str) -> str:
    if "no matches for kind" in said or "the server doesn't have a resource type" in said:
        return "a cluster where JobSet is installed (https://jobset.sigs.k8s.io)"
    if "orbidden" in said or "nauthorized" in said:
        return "kubectl auth can-i create jobsets.jobset.x-k8s.io, in the namespace of --namespace"
    return "kubectl config get-contexts, which says what --context may be; kubectl cluster-info"

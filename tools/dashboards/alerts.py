"""Prometheus's alerts as rules of Grafana, so that its contact points send notifications.

Each rule has three nodes, as in Grafana's own translation: the query, a check that it returned a series, and the
condition on that check. The comparison in PromQL has already filtered the series, whose values may be 0.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeAlias

import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules" / "torchotel.yaml"
_HEAD = "# Written by `make dashboards` from deploy/prometheus/rules/torchotel.yaml: change that, or these come back.\n"
_QUERY, _SEEN, _FIRES = "query", "prometheus_math", "threshold"
_LOOK_BACK_S = 600

Tree: TypeAlias = dict[str, object]


def alerts() -> str:
    """Return the text of the provisioning file."""
    groups = [_group(group) for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]]
    return _HEAD + yaml.safe_dump({"apiVersion": 1, "groups": groups}, sort_keys=False, width=120)


def _group(group: dict[str, object]) -> Tree:
    rules = group["rules"]
    assert isinstance(rules, list)  # noqa: S101  # promtool has checked the file
    return {
        "orgId": 1,
        "name": group["name"],
        "folder": "torchotel",
        "interval": group["interval"],
        "rules": [_rule(rule) for rule in rules if "alert" in rule],
    }


def _rule(rule: dict[str, object]) -> Tree:
    name, annotations = str(rule["alert"]), rule["annotations"]
    assert isinstance(annotations, dict)  # noqa: S101  # promtool has checked the file too
    return {
        "uid": re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower(),
        "title": name,
        "condition": _FIRES,
        "data": [
            _node(_QUERY, "prometheus", {"expr": " ".join(str(rule["expr"]).split()), "instant": True, "range": False}),
            _node(_SEEN, "__expr__", {"type": "math", "expression": _any_number()}),
            _node(_FIRES, "__expr__", {"type": "threshold", "expression": _SEEN, "conditions": [_above_0()]}),
        ],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.get("for", "0s"),
        "labels": rule["labels"],
        # In Grafana $value is a description of all nodes.
        "annotations": {key: text.replace("$value ", f"$values.{_QUERY}.Value ") for key, text in annotations.items()},
    }


def _above_0() -> Tree:
    return {"evaluator": {"type": "gt", "params": [0]}}


def _any_number() -> str:
    return " || ".join(f"{test}(${_QUERY})" for test in ("is_number", "is_nan", "is_inf"))


def _node(name: str, source: str, model: Tree) -> Tree:
    span = {"from": _LOOK_BACK_S, "to": 0}
    return {"refId": name, "relativeTimeRange": span, "datasourceUid": source, "model": {"refId": name, **model}}

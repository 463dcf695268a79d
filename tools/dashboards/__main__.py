"""Write the generated files; `make dashboards` calls it."""

from __future__ import annotations

from tools.dashboards.generated import FOLDER, generated


def main() -> None:
    """Write every file to its place under `deploy/grafana/`."""
    for name, text in generated().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The stages as Ray actors and Serve deployments. `deployments:app` is the service: `serve run deployments:app KEY=VALUE ...`.

Importing this package imports neither ray nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, Any]) -> Application:
    """Build the service. What is wrong with the arguments is one line on stderr each, and exit code 2; Ctrl-C before it begins is
    130."""
    import sys

    from pipeline.cli.entry import INTERRUPTED
    from pipeline.errors import Locked, UserError

    try:
        from deployments.application import build

        return build(args)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (UserError, Locked) as error:
        sys.stderr.writelines(f"error: {line}\n" for line in str(error).splitlines())
        raise SystemExit(4 if isinstance(error, Locked) else 2) from None

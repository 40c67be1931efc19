"""The dashboard: pages that a browser shows of runs, alive or dead.

    browser ─ `/`, `/static/…` ─▶ pages     our modules, and plotly.js out of the package `plotly`; no token
            ─ `/v1/session` ────▶ session   a token is traded for a cookie
            ─ `/v1/…` ──────────▶ the routes of the controller: of the job that it serves
            ─ `/runs/0/v1/…` ───▶ `python -m controller.dashboard RUN…`: of run directories

`view` reads what both have in common from a run directory. What the pages do is in `static`: `app.js` first.
"""

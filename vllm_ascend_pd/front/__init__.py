# SPDX-License-Identifier: Apache-2.0
"""What runs in the API server process: flags, the front door of a decode instance, and the /pd routes.

Edits of upstream files call `flags`, `resolve`, `serve_args`, `hooks` and `error_response`; none of these
imports vLLM when it is imported.
"""

# SPDX-License-Identifier: Apache-2.0
"""The checks of one host, by what they are about. Each is a function from facts to `Check`s; facts can be injected."""

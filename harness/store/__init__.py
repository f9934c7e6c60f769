"""Where results live: one folder a point, committed whole or not at all; everything else is derived from them.

<out>/sweep.json                        what was asked for last: command, overrides, fingerprints in order
<out>/points/<fingerprint>/record.json  a finished point; written last, so its presence means "done"
                           steps.parquet, requests.parquet
                           failure.json  a point that failed, with its traceback; never counts as done
<out>/summary.parquet                   one row a point, rebuilt from the records
<out>/.lock                             held by the sweep that writes here (harness.store.lock)
"""

"""What do we believe of the pods' costs and limits? An estimator a file, fed with what reports say
and how requests end: prompts, loads, limits, time per token, outliers, slowness.

Begin with `concurrency`, one limit of one endpoint. Nothing here knows which endpoints there are:
`pods` makes the estimators, feeds them and reads them. `sequential` says which of two ways to serve
requests is worse, of policies or of versions.

An event has one name, whoever hears of it, and `now` is its last argument. Each is fed in one place
of `pods`:

- `reported`, a load report: `EndpointState.reported`
- `picked`: `PodLoad.picked` for the endpoint, `Flights` for the pool
- `ended`: `OwnRequests.ended`, and `PeerRequests.ended` for sums, beside it; `Flights` for the pool
- `had_first_token`, and the bytes of streamed responses: `Accounting`, from the access log alone
- `answered`, `listed` and `restarted`, of calls of ours: `Pool`
"""

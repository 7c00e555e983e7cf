-- Requests for wrk: a chat completion for each adapter in turn. Settings come by environment,
-- because wrk looks for `delay` before it gives this script its arguments.
--
-- With BENCH_RATE requests leave on a schedule (one each 1/rate seconds, whichever connection is
-- free next) instead of as soon as the last one is answered.

local ffi = require("ffi")
ffi.cdef [[
  typedef struct { long tv_sec; long tv_nsec; } bench_timespec;
  int clock_gettime(int clock, bench_timespec *now);
]]

local num_adapters = tonumber(os.getenv("BENCH_ADAPTERS"))
local body_bytes = tonumber(os.getenv("BENCH_BODY_BYTES"))
local rate = tonumber(os.getenv("BENCH_RATE") or "")

local CLOCK_MONOTONIC = 1
local timespec = ffi.new("bench_timespec[1]")
local function now_ms()
  ffi.C.clock_gettime(CLOCK_MONOTONIC, timespec)
  return tonumber(timespec[0].tv_sec) * 1e3 + tonumber(timespec[0].tv_nsec) / 1e6
end

local requests = {}
local turn = 0

function init(_)
  local template = '{"model":"adapter-%02d","messages":[{"role":"user","content":"%s"}],"max_tokens":16}'
  local padding = string.rep("x", body_bytes - #string.format(template, 0, ""))
  for number = 0, num_adapters - 1 do
    local body = string.format(template, number, padding)
    requests[number] = wrk.format("POST", "/v1/chat/completions",
      { ["content-type"] = "application/json" }, body)
  end
end

function request()
  turn = (turn + 1) % num_adapters
  return requests[turn]
end

if rate then
  local next_ms = nil
  function delay()
    local now = now_ms()
    next_ms = (next_ms or now) + 1e3 / rate
    return math.max(0, math.floor(next_ms - now + 0.5))
  end
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    '\nBENCH {"requests":%d,"duration_us":%d,"bad_statuses":%d,"socket_errors":%d,' ..
    '"p50_us":%d,"p90_us":%d,"p99_us":%d,"max_us":%d}\n',
    summary.requests, summary.duration, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency.max))
end

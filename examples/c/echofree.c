/* An exported canceller in C: onnxruntime's C API for the network, and the linear stage beside it (DC blocker, delay,
 * Kalman filter), with the numbers of the artifact's contract.json.
 *
 *     make
 *     ONNXRUNTIME_LIB=/path/to/libonnxruntime.so ./echofree export/onnx mic.wav far.wav out.wav
 *
 * mic.wav and far.wav: one channel, 16 bit or float, at the model's rate. out.wav: float, as a stream gives it, so late
 * by latency_samples. The same steps as in src/echofree/runtime, where they are explained.
 *
 * Legend: M hop, F bins (M + 1), L partitions (the ring's rows stand twice, L rows apart), Q hop at the low rate.
 */

#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PI 3.14159265358979323846
#define TINY 1e-20f
#define MAX_STATES 128
#define MAX_SIGNALS 4

static void die(const char *what, const char *which) {
    fprintf(stderr, "echofree: %s%s%s\n", what, *which ? ": " : "", which);
    exit(1);
}

static void *zeros(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) die("out of memory", "");
    return memory;
}

/* --- onnxruntime: the first entries of its function table, whose order never changes. With its header at hand, compile
 *     with -DORT_HEADER. -------------------------------------------------------------------------------------------- */

#ifdef ORT_HEADER
#include <onnxruntime_c_api.h>
#else
typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtApi {
    void *skip0[2];
    const char *(*GetErrorMessage)(const OrtStatus *);
    OrtStatus *(*CreateEnv)(int level, const char *id, OrtEnv **);
    void *skip4[3];
    OrtStatus *(*CreateSession)(const OrtEnv *, const char *path, const OrtSessionOptions *, OrtSession **);
    void *skip8[1];
    OrtStatus *(*Run)(OrtSession *, const OrtRunOptions *, const char *const *names, const OrtValue *const *values,
                      size_t count, const char *const *out_names, size_t out_count, OrtValue **outs);
    OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **);
    void *skip11[13];
    OrtStatus *(*SetIntraOpNumThreads)(OrtSessionOptions *, int);
    void *skip25[24];
    OrtStatus *(*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo *, void *data, size_t bytes, const int64_t *shape,
                                                 size_t axes, int type, OrtValue **);
    void *skip50[19];
    OrtStatus *(*CreateCpuMemoryInfo)(int allocator, int memory, OrtMemoryInfo **);
} OrtApi;
typedef struct OrtApiBase {
    const OrtApi *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;
#define ORT_API_VERSION 1
#endif
#define ORT_FLOAT 1
#define ORT_WARNING 2

static const OrtApi *ort;

static void ok(OrtStatus *status) {
    if (status) die("onnxruntime", ort->GetErrorMessage(status));
}

/* --- contract.json: no general parser, only what such a file holds --------------------------------------------------- */

static char *read_file(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) die("can't read", path);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *text = zeros((size_t)size + 1, 1);
    if (fread(text, 1, (size_t)size, file) != (size_t)size) die("can't read", path);
    fclose(file);
    return text;
}

static const char *value_of(const char *text, const char *key) {
    char quoted[128];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(text, quoted);
    if (!at) die("contract.json lacks", key);
    at += strlen(quoted);
    while (*at == ' ' || *at == '\n') at++;
    return at;
}

static double number(const char *text, const char *key) { return strtod(value_of(text, key), NULL); }

/* All numbers of a list, nested or not, into `out`; -> how many. */
static size_t numbers(const char *at, double *out, size_t most) {
    size_t count = 0;
    int depth = 0;
    do {
        depth += (*at == '[') - (*at == ']');
        if ((*at >= '0' && *at <= '9') || *at == '-') {
            char *end;
            if (count == most) die("contract.json: a list is too long", "");
            out[count++] = strtod(at, &end);
            at = end;
        } else {
            at++;
        }
    } while (depth > 0);
    return count;
}

/* A quoted text from `at` on, into a new string; *end behind it. */
static char *quoted(const char *at, const char **end) {
    const char *first = strchr(at, '"');
    const char *last = first ? strchr(first + 1, '"') : NULL;
    if (!last) die("contract.json: a text was expected", "");
    char *out = zeros((size_t)(last - first), 1);
    memcpy(out, first + 1, (size_t)(last - first - 1));
    if (end) *end = last + 1;
    return out;
}

static size_t shape_of(const char *at, int64_t *shape, size_t *axes) {
    size_t size = 1;
    *axes = 0;
    at = strchr(at, '[') + 1;
    for (;;) {
        char *end;
        long axis = strtol(at, &end, 10);
        if (end == at) return size;
        shape[(*axes)++] = axis;
        size *= (size_t)axis;
        at = end + strspn(end, " ,\n");
    }
}

/* --- FFT of real signals, sizes of factors 2, 3 and 5, by a complex one of half the size ------------------------------ */

typedef struct {
    float re, im;
} Complex;

typedef struct {
    int n, half;
    Complex *turn, *half_turn, *in, *out; /* exp(-2 pi i k / half), exp(-2 pi i k / n) */
} Fft;

static Complex times(Complex a, Complex b) { return (Complex){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }

static Fft new_fft(int n) {
    Fft f = {n, n / 2, zeros((size_t)n / 2, sizeof(Complex)), zeros((size_t)n / 2 + 1, sizeof(Complex)),
             zeros((size_t)n / 2, sizeof(Complex)), zeros((size_t)n / 2 + 1, sizeof(Complex))};
    for (int k = 0; k < f.half; k++)
        f.turn[k] = (Complex){(float)cos(2 * PI * k / f.half), (float)-sin(2 * PI * k / f.half)};
    for (int k = 0; k <= f.half; k++)
        f.half_turn[k] = (Complex){(float)cos(2 * PI * k / n), (float)-sin(2 * PI * k / n)};
    return f;
}

static Complex plus(Complex a, Complex b) { return (Complex){a.re + b.re, a.im + b.im}; }

static Complex minus(Complex a, Complex b) { return (Complex){a.re - b.re, a.im - b.im}; }

/* The four outputs of a transform of four. */
static void four(Complex a, Complex b, Complex c, Complex d, Complex *out, int step) {
    Complex even = plus(a, c), odd = plus(b, d), left = minus(a, c), right = minus(b, d);
    out[0] = plus(even, odd);
    out[step] = (Complex){left.re + right.im, left.im - right.re};
    out[2 * step] = minus(even, odd);
    out[3 * step] = (Complex){left.re - right.im, left.im + right.re};
}

static void transform(const Fft *f, const Complex *in, int stride, Complex *out, int n) {
    if (n == 1) {
        out[0] = in[0];
        return;
    }
    if (n == 4) {
        four(in[0], in[stride], in[2 * stride], in[3 * stride], out, 1);
        return;
    }
    if (n % 4 == 0) { /* most of the work: hops are powers of two, or nearly */
        int m = n / 4;
        for (int q = 0; q < 4; q++) transform(f, in + q * stride, stride * 4, out + q * m, m);
        for (int k = 0; k < m; k++) {
            const Complex *turn = f->turn + k * stride;
            four(out[k], times(out[m + k], turn[0]), times(out[2 * m + k], turn[k * stride]),
                 times(out[3 * m + k], turn[2 * k * stride]), out + k, m);
        }
        return;
    }
    int r = n % 2 == 0 ? 2 : n % 3 == 0 ? 3 : n % 5 == 0 ? 5 : 0, m = r ? n / r : 0;
    if (!r) die("the FFT takes sizes of factors 2, 3 and 5 only", "");
    for (int q = 0; q < r; q++) transform(f, in + q * stride, stride * r, out + q * m, m);
    for (int k = 0; k < m; k++) {
        Complex t[5];
        for (int q = 0; q < r; q++) t[q] = times(out[q * m + k], f->turn[q * k * stride]);
        for (int j = 0; j < r; j++) {
            Complex sum = t[0];
            for (int q = 1; q < r; q++) {
                Complex part = times(t[q], f->turn[q * j % r * (f->half / r)]);
                sum.re += part.re;
                sum.im += part.im;
            }
            out[j * m + k] = sum;
        }
    }
}

static void rfft(const Fft *f, const float *x, Complex *out) {
    for (int k = 0; k < f->half; k++) f->in[k] = (Complex){x[2 * k], x[2 * k + 1]};
    transform(f, f->in, 1, f->out, f->half);
    f->out[f->half] = f->out[0];
    for (int k = 0; k <= f->half; k++) {
        Complex a = f->out[k], b = f->out[f->half - k];
        Complex even = {0.5f * (a.re + b.re), 0.5f * (a.im - b.im)}, odd = {0.5f * (a.im + b.im), 0.5f * (b.re - a.re)};
        odd = times(odd, f->half_turn[k]);
        out[k] = (Complex){even.re + odd.re, even.im + odd.im};
    }
}

static void irfft(const Fft *f, const Complex *x, float *out) {
    for (int k = 0; k < f->half; k++) {
        Complex a = x[k], b = x[f->half - k], w = {f->half_turn[k].re, -f->half_turn[k].im};
        if (k == 0) a.im = b.im = 0; /* DC and Nyquist are real */
        Complex even = {0.5f * (a.re + b.re), 0.5f * (a.im - b.im)}, odd = {0.5f * (a.re - b.re), 0.5f * (a.im + b.im)};
        odd = times(odd, w);
        f->in[k] = (Complex){even.re - odd.im, -(even.im + odd.re)}; /* conjugated: a forward transform goes back */
    }
    transform(f, f->in, 1, f->out, f->half);
    for (int k = 0; k < f->half; k++) {
        out[2 * k] = f->out[k].re / (float)f->half;
        out[2 * k + 1] = -f->out[k].im / (float)f->half;
    }
}

/* --- recursive filters ------------------------------------------------------------------------------------------------ */

typedef struct {
    double b[3], a[3], s[2];
} Iir;

static Iir dc_blocker(double cutoff_hz, double rate_hz) {
    double t = tan(PI * cutoff_hz / rate_hz);
    return (Iir){{1 / (1 + t), -1 / (1 + t), 0}, {1, (t - 1) / (1 + t), 0}, {0, 0}};
}

static Iir high_pass(double cutoff_hz, double rate_hz) {
    double t = tan(PI * cutoff_hz / rate_hz), norm = 1 + sqrt(2) * t + t * t;
    return (Iir){{1 / norm, -2 / norm, 1 / norm}, {1, 2 * (t * t - 1) / norm, (1 - sqrt(2) * t + t * t) / norm}, {0, 0}};
}

static void filter(Iir *f, const float *x, float *y, int count) {
    for (int n = 0; n < count; n++) {
        double in = x[n], out = f->b[0] * in + f->s[0];
        f->s[0] = f->s[1] + f->b[1] * in - f->a[1] * out;
        f->s[1] = f->b[2] * in - f->a[2] * out;
        y[n] = (float)out;
    }
}

/* --- drift of the clocks: double cross-correlation --------------------------------------------------------------------- */

#define MAX_SPANS 8

typedef struct {
    int window, before, edge, size, num_spans, spans[MAX_SPANS], first, last, num_drifts, slot, max_move;
    double forget, max_ppm, step_ppm, min_agreement, min_count, count, step;
    float *fade, *cut;
    double *agreement;
    Complex *seen, *spectrum, *product;
    int *at, *ok;
    Fft fft;
} Drift;

static Drift new_drift(const char *text, double low_rate_hz, double low_hz, double high_hz, int step) {
    Drift d = {.forget = number(text, "forget"), .max_ppm = number(text, "max_ppm"),
               .step_ppm = number(text, "step_ppm"), .min_agreement = number(text, "min_agreement"),
               .min_count = number(text, "min_count"), .step = step};
    d.window = (int)number(text, "window"), d.before = (int)number(text, "before"), d.edge = (int)number(text, "edge");
    d.max_move = (int)number(text, "max_move");
    double spans[MAX_SPANS];
    d.num_spans = (int)numbers(value_of(text, "spans"), spans, MAX_SPANS);
    for (int j = 0; j < d.num_spans; j++) {
        d.spans[j] = (int)spans[j];
        d.size = d.spans[j] > d.size ? d.spans[j] : d.size;
    }
    for (int k = 0; k <= d.window / 2; k++) {
        double hz = k * low_rate_hz / d.window;
        d.first += hz < low_hz, d.last += hz <= high_hz;
    }
    size_t bins = (size_t)(d.last - d.first), window = (size_t)d.window;
    d.num_drifts = (int)(2 * d.max_ppm / d.step_ppm + 1.5);
    d.fade = zeros(window, sizeof(float)), d.cut = zeros(window, sizeof(float));
    for (int n = 0; n < d.window; n++) {
        int near = n < d.window - 1 - n ? n : d.window - 1 - n;
        d.fade[n] = near < d.edge ? (float)(0.5 - 0.5 * cos(PI * (near + 0.5) / d.edge)) : 1;
    }
    d.agreement = zeros((size_t)d.num_drifts, sizeof(double));
    d.seen = zeros((size_t)d.size * bins, sizeof(Complex));
    d.spectrum = zeros(window / 2 + 1, sizeof(Complex)), d.product = zeros(bins, sizeof(Complex));
    d.at = zeros((size_t)d.size, sizeof(int)), d.ok = zeros((size_t)d.size, sizeof(int));
    d.fft = new_fft(d.window);
    return d;
}

/* Takes in the correlation `cut` around the delay `at`. */
static void compare(Drift *d, int at, int valid) {
    int bins = d->last - d->first;
    double norm = 0;
    for (int n = 0; n < d->window; n++) d->cut[n] *= d->fade[n];
    rfft(&d->fft, d->cut, d->spectrum);
    Complex *now = d->spectrum + d->first;
    for (int k = 0; k < bins; k++) norm += (double)now[k].re * now[k].re + (double)now[k].im * now[k].im;
    norm = sqrt(norm) + 1e-20;
    for (int k = 0; k < bins; k++) now[k].re /= (float)norm, now[k].im /= (float)norm;
    if (valid) {
        for (int e = 0; e < d->num_drifts; e++) d->agreement[e] *= d->forget;
        d->count *= d->forget;
    }
    for (int j = 0; j < d->num_spans && valid; j++) {
        int then = ((d->slot - d->spans[j]) % d->size + d->size) % d->size, moved = at - d->at[then];
        if (!d->ok[then] || abs(moved) >= d->max_move) continue;
        d->count += 1;
        for (int k = 0; k < bins; k++) {
            double turn = 2 * PI * (d->first + k) / d->window * moved;
            Complex before = times(d->seen[then * bins + k], (Complex){(float)cos(turn), (float)sin(turn)});
            d->product[k] = times((Complex){now[k].re, -now[k].im}, before);
        }
        for (int e = 0; e < d->num_drifts; e++) {
            /* exp(-j omega drift span) over the bins, by recurrence */
            double unit = 2 * PI / d->window * (-d->max_ppm + e * d->step_ppm) * 1e-6 * d->spans[j] * d->step;
            double c = cos(unit * d->first), s = sin(unit * d->first), dc = cos(unit), ds = sin(unit), sum = 0;
            for (int k = 0; k < bins; k++) {
                sum += d->product[k].re * c + d->product[k].im * s;
                double next = c * dc - s * ds;
                s = s * dc + c * ds, c = next;
            }
            d->agreement[e] += sum;
        }
    }
    memcpy(d->seen + (size_t)d->slot * (size_t)bins, now, (size_t)bins * sizeof(Complex));
    d->at[d->slot] = at, d->ok[d->slot] = valid;
    d->slot = (d->slot + 1) % d->size;
}

/* -> whether a drift can be told; *drift: samples per sample, positive when the microphone falls behind. */
static int told(const Drift *d, double *drift) {
    int best = 0;
    for (int e = 1; e < d->num_drifts; e++)
        if (d->agreement[e] > d->agreement[best]) best = e;
    if (best == 0 || best == d->num_drifts - 1) return 0;
    double left = d->agreement[best - 1], mid = d->agreement[best], right = d->agreement[best + 1];
    double curve = left - 2 * mid + right, offset = curve < 0 ? 0.5 * (left - right) / (curve - 1e-20) : 0;
    *drift = (-d->max_ppm + (best + offset) * d->step_ppm) * 1e-6;
    return d->count >= d->min_count && mid > d->min_agreement * d->count;
}

/* --- delay: GCC-PHAT at a low rate ------------------------------------------------------------------------------------ */

typedef struct {
    double low_rate_hz, tolerance, min_confidence, forget[2], lag, confidence, candidate, early_share, max_drift, rate;
    int far_size, mic_size, lead, taps, num_agree, factor, low_hop, period, first, last, agree, found, early, jolt;
    float *kernel, *line[2], *fresh[2], *mic, *far, *segment, *values;
    Complex *cross[2], *sum, *spectrum[2];
    Fft fft;
    Drift drift;
} Delay;

static double bessel0(double x) {
    double sum = 1, term = 1;
    for (int k = 1; k < 60; k++) sum += term *= (x / 2 / k) * (x / 2 / k);
    return sum;
}

static float *low_pass(int taps, int factor) {
    float *kernel = zeros((size_t)taps, sizeof(float));
    double sum = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < taps; i++) {
            double n = i - (taps - 1) / 2.0, x = PI * n * 0.9 / factor, edge = 2 * n / (taps - 1);
            double h = (x == 0 ? 1 : sin(x) / x) * bessel0(5 * sqrt(1 - edge * edge)) / bessel0(5);
            if (pass) kernel[i] = (float)(h / sum);
            else sum += h;
        }
    return kernel;
}

/* line: the last taps - 1 samples, and room for a hop; -> count samples at the low rate */
static void decimate(const float *kernel, int taps, int factor, float *line, const float *x, float *out, int count) {
    int hop = count * factor;
    memcpy(line + taps - 1, x, (size_t)hop * sizeof(float));
    for (int j = 0; j < count; j++) {
        float sum = 0;
        for (int t = 0; t < taps; t++) sum += kernel[taps - 1 - t] * line[(j + 1) * factor - 1 + t];
        out[j] = sum;
    }
    memmove(line, line + hop, (size_t)(taps - 1) * sizeof(float));
}

static Delay new_delay(const char *text, int rate_hz, int hop) {
    Delay d = {.low_rate_hz = number(text, "low_rate_hz"), .tolerance = number(text, "tolerance"),
               .min_confidence = number(text, "min_confidence"), .early_share = number(text, "early_share"),
               .forget = {number(text, "forget_fast"), number(text, "forget_slow")},
               .max_drift = number(text, "max_drift_ppm") * 1e-6, .early = (int)number(text, "early_samples")};
    d.far_size = (int)number(text, "far_samples"), d.mic_size = (int)number(text, "mic_samples");
    d.lead = (int)number(text, "lead_samples"), d.taps = (int)number(text, "taps");
    d.num_agree = (int)number(text, "num_agree"), d.period = (int)number(text, "period");
    d.factor = rate_hz / (int)d.low_rate_hz, d.low_hop = hop / d.factor;
    d.kernel = low_pass(d.taps, d.factor);
    for (int i = 0; i < 2; i++) {
        d.line[i] = zeros((size_t)(d.taps - 1 + hop), sizeof(float));
        d.fresh[i] = zeros((size_t)(d.period * d.low_hop), sizeof(float));
        d.spectrum[i] = zeros((size_t)(d.far_size / 2 + 1), sizeof(Complex));
    }
    d.mic = zeros((size_t)(d.mic_size + d.lead), sizeof(float)), d.far = zeros((size_t)d.far_size, sizeof(float));
    d.segment = zeros((size_t)d.far_size, sizeof(float)), d.values = zeros((size_t)d.far_size, sizeof(float));
    for (int i = 0; i < 2; i++) d.cross[i] = zeros((size_t)(d.far_size / 2 + 1), sizeof(Complex));
    d.sum = zeros((size_t)(d.far_size / 2 + 1), sizeof(Complex));
    for (int k = 0; k <= d.far_size / 2; k++) {
        double hz = k * d.low_rate_hz / d.far_size;
        d.first += hz < number(text, "low_hz"), d.last += hz <= number(text, "high_hz");
    }
    d.fft = new_fft(d.far_size);
    d.drift = new_drift(value_of(text, "drift"), d.low_rate_hz, number(text, "low_hz"), number(text, "high_hz"),
                        d.period * d.low_hop);
    return d;
}

static void observe(Delay *d, const float *mic, const float *far, int slot, int hop) {
    const float *x[2] = {mic, far};
    (void)hop;
    for (int i = 0; i < 2; i++)
        decimate(d->kernel, d->taps, d->factor, d->line[i], x[i], d->fresh[i] + slot * d->low_hop, d->low_hop);
}

static void push(float *buffer, int size, const float *fresh, int count) {
    memmove(buffer, buffer + count, (size_t)(size - count) * sizeof(float));
    memcpy(buffer + size - count, fresh, (size_t)count * sizeof(float));
}

static int steady(const Delay *d) {
    double block[16] = {0}, most = 0;
    int size = d->far_size / 16, count = 0;
    for (int i = 0; i < 16; i++) {
        for (int n = 0; n < size; n++) block[i] += (double)d->far[i * size + n] * d->far[i * size + n] / size;
        most = fmax(most, block[i]);
    }
    for (int i = 0; i < 16; i++) count += block[i] > 1e-4 * most + 1e-14;
    return count >= 4;
}

/* The lag with the highest correlation, or the earliest one before it that is half as high; -> whether it's found anew. */
static void decide(Delay *d) {
    int num_lags = d->far_size - d->mic_size + 1, highest = 0, best;
    double square = 0, offset = 0;
    for (int k = d->first; k < d->last; k++)
        d->sum[k] = (Complex){d->cross[0][k].re + d->cross[1][k].re, d->cross[0][k].im + d->cross[1][k].im};
    irfft(&d->fft, d->sum, d->values);
    float *v = d->values;
    for (int i = 0; i < num_lags; i++) {
        v[i] = fabsf(v[i]);
        square += (double)v[i] * v[i] / num_lags;
        if (v[i] > v[highest]) highest = i;
    }
    best = highest;
    for (int i = highest; i <= highest + d->early && i < num_lags; i++)
        if (v[i] >= (float)d->early_share * v[highest] && (i == 0 || v[i] >= v[i - 1]) &&
            (i == num_lags - 1 || v[i] >= v[i + 1]))
            best = i;
    if (best >= 1 && best <= num_lags - 2) {
        double left = v[best - 1], right = v[best + 1], curve = left - 2 * v[best] + right;
        if (curve < 0) offset = fmin(fmax((left - right) / (2 * curve - 1e-20), -0.5), 0.5);
    }
    double lag = d->far_size - d->mic_size - d->lead - best - offset;
    d->confidence = v[highest] / (sqrt(square) + 1e-20);
    if (d->confidence <= d->min_confidence) {
        d->agree = 0;
        return;
    }
    d->agree = fabs(lag - d->candidate) <= d->tolerance ? (d->agree < 100 ? d->agree + 1 : 100) : 1;
    d->candidate = lag;
    if (d->agree >= d->num_agree) d->lag = lag, d->found = 1;
}

/* spectrum[1] holds the newest whitened cross-spectrum */
static void follow(Delay *d, int active) {
    int at = (int)rintf((float)d->lag), zero = d->far_size - d->mic_size - d->lead;
    double drift = 0, before = d->rate;
    for (int k = 0; k <= d->far_size / 2; k++)
        if (k < d->first || k >= d->last) d->spectrum[1][k] = (Complex){0, 0};
    irfft(&d->fft, d->spectrum[1], d->values);
    for (int n = 0; n < d->drift.window; n++) {
        int i = (zero - at - n + d->drift.before) % d->far_size;
        d->drift.cut[n] = d->values[i < 0 ? i + d->far_size : i];
    }
    compare(&d->drift, at, active && d->found);
    if (told(&d->drift, &drift) && (fabs(drift) > d->max_drift || before != 0)) d->rate = drift;
    d->jolt = fabs(d->rate - before) > d->max_drift;
}

static void update(Delay *d) {
    int count = d->period * d->low_hop;
    push(d->mic, d->mic_size + d->lead, d->fresh[0], count);
    push(d->far, d->far_size, d->fresh[1], count);
    memcpy(d->segment, d->mic, (size_t)d->mic_size * sizeof(float));
    rfft(&d->fft, d->segment, d->spectrum[0]);
    rfft(&d->fft, d->far, d->spectrum[1]);
    double level = 0;
    for (int k = d->first; k < d->last; k++) {
        Complex m = d->spectrum[0][k];
        m.im = -m.im;
        d->spectrum[1][k] = times(m, d->spectrum[1][k]);
        level += hypot(d->spectrum[1][k].re, d->spectrum[1][k].im) / (d->last - d->first);
    }
    int active = level > 1e-12 && steady(d);
    for (int k = d->first; k < d->last; k++) {
        Complex *c = &d->spectrum[1][k];
        double scale = 1 / (hypot(c->re, c->im) + 0.05 * level + 1e-20);
        double turn = 2 * PI * k / d->far_size * count * d->rate;
        *c = (Complex){(float)(scale * c->re), (float)(scale * c->im)};
        for (int i = 0; i < 2 && active; i++) {
            Complex past = times(d->cross[i][k], (Complex){(float)cos(turn), (float)sin(turn)});
            float keep = (float)d->forget[i];
            d->cross[i][k] = (Complex){keep * past.re + (1 - keep) * c->re, keep * past.im + (1 - keep) * c->im};
        }
    }
    if (active) decide(d);
    follow(d, active);
}

/* --- the far end's past, read with delay and drift taken out ----------------------------------------------------------- */

#define MAX_TAPS 32
#define MAX_TERMS 8

typedef struct {
    int hop, count, most, taps, terms, end, whole;
    float fraction, rate, *past, farrow[MAX_TAPS][MAX_TERMS];
} FarLine;

static FarLine new_line(const char *text, int hop, int count, int max_samples) {
    FarLine f = {.hop = hop, .count = count, .most = max_samples + hop};
    double table[MAX_TAPS * MAX_TERMS];
    const char *at = value_of(text, "farrow");
    size_t all = numbers(at, table, MAX_TAPS * MAX_TERMS);
    f.terms = (int)numbers(strchr(at + 1, '['), table, MAX_TERMS);
    f.taps = (int)all / f.terms;
    if (f.taps > MAX_TAPS) die("contract.json: farrow is too long", "");
    numbers(at, table, MAX_TAPS * MAX_TERMS);
    for (int j = 0; j < f.taps; j++)
        for (int k = 0; k < f.terms; k++) f.farrow[j][k] = (float)table[j * f.terms + k];
    f.end = f.most + (count + 1) * hop + f.taps;
    f.past = zeros((size_t)(f.end + f.taps / 2), sizeof(float)); /* what is yet to come counts as silence */
    return f;
}

/* The hop that begins `back` samples ago; base: its whole delay, start: what its delay is above that. */
static void read_line(const FarLine *f, int back, int base, float start, float *out) {
    const float *x = f->past + f->end - back - base - f->taps / 2;
    for (int m = 0; m < f->hop; m++, x++) {
        float late = start + f->rate * (float)(m + 1), y = 0;
        for (int k = f->terms - 1; k >= 0; k--) {
            float sum = 0;
            for (int j = 0; j < f->taps; j++) sum += x[j] * f->farrow[j][k];
            y = sum + y * late;
        }
        out[m] = y;
    }
}

static void advance(FarLine *f, const float *far, float *out) {
    size_t hop = (size_t)f->hop;
    memmove(f->past, f->past + hop, ((size_t)f->end - hop) * sizeof(float));
    memcpy(f->past + f->end - f->hop, far, hop * sizeof(float));
    if (f->rate == 0 && f->fraction == 0) {
        memcpy(out, f->past + f->end - f->hop - f->whole, hop * sizeof(float));
        return;
    }
    float middle = rintf(f->fraction + f->rate * (0.5f * (float)f->hop));
    read_line(f, f->hop, f->whole + (int)middle, f->fraction - middle, out);
    float after = f->fraction + f->rate * (float)f->hop, carry = rintf(after);
    f->whole += (int)carry, f->fraction = after - carry;
    float taken = (float)f->whole + f->fraction;
    int first = f->taps / 2;
    if (f->rate == 0 || (taken >= (float)first && taken <= (float)f->most)) return;
    f->whole = f->whole < first ? first : f->whole > f->most ? f->most : f->whole;
    f->fraction = 0;
}

/* --- Kalman filter ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int hop, bins, count, posterior;
    double transition, smoothing;
    Complex *weight, *response, *sum, *plain, *passed, *drive, *part;
    float *profile; /* [L], of the least variance */
    float *variance, *psd, *total, *wave, *after, *errors[2]; /* errors: second halves, a priori, plain and high-passed */
    Fft fft;
} Kalman;

/* high: the high-pass on the error, or NULL. */
static Kalman new_kalman(const char *text, int hop, const Iir *high) {
    Kalman f = {.hop = hop, .bins = hop + 1, .count = (int)number(text, "num_partitions"),
                .transition = number(text, "transition"), .smoothing = number(text, "psd_smoothing")};
    size_t bins = (size_t)f.bins, num = (size_t)f.count, size = 2 * (size_t)hop;
    f.weight = zeros(num * bins, sizeof(Complex)), f.variance = zeros(num * bins, sizeof(float));
    Complex **rows[] = {&f.response, &f.sum, &f.plain, &f.passed, &f.drive, &f.part};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = zeros(bins, sizeof(Complex));
    f.psd = zeros(bins, sizeof(float)), f.total = zeros(bins, sizeof(float));
    float **waves[] = {&f.wave, &f.after, &f.errors[0], &f.errors[1]};
    for (size_t i = 0; i < sizeof waves / sizeof *waves; i++) *waves[i] = zeros(size, sizeof(float));
    for (int k = 0; k < f.bins; k++) { /* response of the high-pass at the bins */
        f.response[k] = (Complex){1, 0};
        if (!high) continue;
        double w = PI * k / hop, c1 = cos(w), s1 = -sin(w), c2 = cos(2 * w), s2 = -sin(2 * w);
        const double *b = high->b, *a = high->a;
        double tr = b[0] + b[1] * c1 + b[2] * c2, ti = b[1] * s1 + b[2] * s2;
        double br = a[0] + a[1] * c1 + a[2] * c2, bi = a[1] * s1 + a[2] * s2, norm = br * br + bi * bi;
        f.response[k] = (Complex){(float)((tr * br + ti * bi) / norm), (float)((ti * br - tr * bi) / norm)};
    }
    f.profile = zeros(num, sizeof(float));
    for (size_t l = 0; l < num; l++) f.profile[l] = 1;
    f.fft = new_fft(2 * hop);
    return f;
}

/* x: spectra of the far end [L, F], oldest first -> a-priori echo, [M] */
static const float *predict(Kalman *f, const Complex *x) {
    memset(f->sum, 0, (size_t)f->bins * sizeof(Complex));
    for (int l = 0; l < f->count; l++)
        for (int k = 0; k < f->bins; k++) {
            Complex y = times(f->weight[l * f->bins + k], x[l * f->bins + k]);
            f->sum[k].re += y.re, f->sum[k].im += y.im;
        }
    irfft(&f->fft, f->sum, f->wave);
    return f->wave + f->hop;
}

/* Learns from errors; -> the error by which the output is defined. */
static const float *correct(Kalman *f, const Complex *x, const float *power, int learn, double floor_value) {
    int bins = f->bins, hop = f->hop;
    const float *error = f->errors[0] + hop;
    float a = (float)f->transition, gain = a * a, leak = (float)(1 - f->transition * f->transition);
    rfft(&f->fft, f->errors[0], f->plain);
    rfft(&f->fft, f->errors[1], f->passed);
    for (int k = 0; k < bins; k++) {
        Complex e = f->passed[k], h = {f->response[k].re, -f->response[k].im};
        float sum = 0, h2 = h.re * h.re + h.im * h.im;
        f->psd[k] += (float)(1 - f->smoothing) * (e.re * e.re + e.im * e.im - f->psd[k]);
        for (int l = 0; l < f->count; l++) sum += f->variance[l * bins + k] * power[l * bins + k];
        float explained = h2 * sum, total = explained + 2.0f / (float)f->count * f->psd[k] + TINY;
        f->plain[k].re *= 1 - explained / total, f->plain[k].im *= 1 - explained / total;
        f->drive[k] = times(e, h);
        f->drive[k].re /= total, f->drive[k].im /= total;
        f->total[k] = -0.5f * gain * h2 / total;
    }
    if (f->posterior) {
        irfft(&f->fft, f->plain, f->after);
        error = f->after + hop;
    }
    for (int l = 0; l < f->count; l++) {
        Complex *w = f->weight + (size_t)l * (size_t)bins;
        float *v = f->variance + (size_t)l * (size_t)bins;
        const float *p = power + (size_t)l * (size_t)bins;
        float least = (float)floor_value * f->profile[l];
        if (learn) {
            for (int k = 0; k < bins; k++) {
                Complex c = {x[l * bins + k].re, -x[l * bins + k].im};
                c = times(c, f->drive[k]);
                f->part[k] = (Complex){c.re * v[k], c.im * v[k]};
            }
            irfft(&f->fft, f->part, f->wave);
            memset(f->wave + hop, 0, (size_t)hop * sizeof(float));
            rfft(&f->fft, f->wave, f->part);
        }
        for (int k = 0; k < bins; k++) {
            if (learn) w[k].re += f->part[k].re, w[k].im += f->part[k].im;
            w[k].re *= a, w[k].im *= a;
            v[k] *= learn ? v[k] * p[k] * f->total[k] + gain : gain;
            v[k] = fmaxf(v[k] + leak * (w[k].re * w[k].re + w[k].im * w[k].im), least);
        }
    }
    return error;
}

/* The error of each partition is taken to be `amount` times the partition itself; spoilt: the echo path is forgotten. */
static void doubt(Kalman *f, double amount, int spoilt) {
    for (int l = 0; l < f->count; l++) {
        Complex *w = f->weight + (size_t)l * (size_t)f->bins;
        float *v = f->variance + (size_t)l * (size_t)f->bins;
        double size = 0;
        for (int k = 0; k < f->bins; k++) size += ((double)w[k].re * w[k].re + (double)w[k].im * w[k].im) / f->bins;
        for (int k = 0; k < f->bins; k++) v[k] = fmaxf(v[k], (float)(amount * size));
    }
    if (spoilt) memset(f->weight, 0, (size_t)f->count * (size_t)f->bins * sizeof(Complex));
}

/* The far end is from now on delayed by so many samples more. */
static void shift(Kalman *f, int samples, double start) {
    int hop = f->hop, count = f->count, bins = f->bins, all = count * hop;
    size_t size = (size_t)count * (size_t)bins;
    float *taps = zeros((size_t)all, sizeof(float)), *before = zeros(size, sizeof(float));
    memcpy(before, f->variance, size * sizeof(float));
    for (int l = 0; l < count; l++) {
        irfft(&f->fft, f->weight + (size_t)l * (size_t)bins, f->wave);
        memcpy(taps + (count - 1 - l) * hop, f->wave, (size_t)hop * sizeof(float));
    }
    int blocks = (int)floor((double)samples / hop), rest = samples != blocks * hop;
    for (int part = 0; part < count; part++) { /* the newest first */
        int l = count - 1 - part, rows[2] = {part + blocks, part + blocks + rest};
        memset(f->wave, 0, 2 * (size_t)hop * sizeof(float));
        for (int n = 0; n < hop; n++) {
            int from = part * hop + n + samples;
            if (from >= 0 && from < all) f->wave[n] = taps[from];
        }
        rfft(&f->fft, f->wave, f->weight + (size_t)l * (size_t)bins);
        for (int k = 0; k < bins; k++) { /* of the two partitions that it covers, the less certain one counts */
            float most = 0;
            for (int i = 0; i < 2; i++) {
                int known = rows[i] >= 0 && rows[i] < count;
                most = fmaxf(most, known ? before[(count - 1 - rows[i]) * bins + k] : (float)start * f->profile[l]);
            }
            f->variance[l * bins + k] = most;
        }
    }
    free(taps);
    free(before);
}

static double mean_square(const float *x, int count) {
    double sum = 0;
    for (int n = 0; n < count; n++) sum += (double)x[n] * x[n];
    return sum / count;
}

/* --- the shadow filter, which notices that the echo path has changed ---------------------------------------------------- */

typedef struct {
    Kalman filter;
    int low_hop, hops, phase, block, held_learn, taps, factor, since, wait, pause; /* block: hops x low_hop */
    double floor, better, rate, hold, levels[3];
    float *kernel, *line[3], *low[3], *far, *power;
    Complex *spectra;
} Shadow;

static Shadow new_shadow(const char *text, const Delay *delay, double hop_s) {
    int hops = (int)number(text, "hops"), block = hops * delay->low_hop;
    double block_s = hops * hop_s;
    Shadow s = {.filter = new_kalman(text, block, NULL), .low_hop = delay->low_hop, .hops = hops, .block = block,
                .taps = delay->taps, .factor = delay->factor, .kernel = delay->kernel, .floor = number(text, "floor"),
                .better = number(text, "better"), .hold = number(text, "hold_s") / block_s};
    s.rate = fmin(1, block_s / number(text, "level_s"));
    s.wait = (int)ceil(number(text, "first_s") / block_s), s.pause = (int)ceil(number(text, "wait_s") / block_s);
    size_t rows = (size_t)s.filter.count * (size_t)s.filter.bins;
    for (int i = 0; i < 3; i++) {
        s.line[i] = zeros((size_t)s.taps + (size_t)s.low_hop * (size_t)s.factor, sizeof(float));
        s.low[i] = zeros((size_t)block, sizeof(float));
    }
    s.far = zeros(2 * (size_t)block, sizeof(float));
    s.spectra = zeros(rows, sizeof(Complex)), s.power = zeros(rows, sizeof(float));
    return s;
}

/* waves: mic, far and the long filter's error, high-passed -> 1: the echo path has changed; 2: the filter is spoilt too */
static int watch(Shadow *s, const float *const waves[3], int on, int learn, double floor_value) {
    int hop = s->block, bins = s->filter.bins;
    size_t last = (size_t)(s->filter.count - 1) * (size_t)bins, row = (size_t)bins;
    for (int i = 0; i < 3; i++) {
        float *low = s->low[i] + s->phase * s->low_hop;
        decimate(s->kernel, s->taps, s->factor, s->line[i], waves[i], low, s->low_hop);
    }
    learn = s->held_learn = learn && (!s->phase || s->held_learn);
    s->phase = (s->phase + 1) % s->hops;
    if (s->phase) return 0;
    memmove(s->far, s->far + hop, (size_t)hop * sizeof(float));
    memcpy(s->far + hop, s->low[1], (size_t)hop * sizeof(float));
    memmove(s->spectra, s->spectra + row, last * sizeof(Complex));
    memmove(s->power, s->power + row, last * sizeof(float));
    rfft(&s->filter.fft, s->far, s->spectra + last);
    for (size_t k = last; k < last + row; k++)
        s->power[k] = s->spectra[k].re * s->spectra[k].re + s->spectra[k].im * s->spectra[k].im;
    const float *echo = predict(&s->filter, s->spectra);
    float *error = s->filter.errors[0] + hop;
    for (int n = 0; n < hop; n++) s->filter.errors[1][hop + n] = error[n] = s->low[0][n] - echo[n];
    double now[3] = {mean_square(s->low[0], hop), mean_square(s->low[2], hop), mean_square(error, hop)};
    for (int i = 0; i < 3 && on; i++) s->levels[i] += s->rate * (now[i] - s->levels[i]);
    correct(&s->filter, s->spectra, s->power, learn, floor_value);
    double heard = s->levels[0], main_level = s->levels[1], own = s->levels[2];
    if (on) {
        s->wait = s->wait > 0 ? s->wait - 1 : 0;
        s->since = own < s->better * main_level && own < s->better * heard && learn ? s->since + 1 : 0;
    }
    if (!(s->since > s->hold) || s->wait) return 0;
    s->since = 0, s->wait = s->pause;
    return main_level > heard ? 2 : 1;
}

/* --- the linear stage ------------------------------------------------------------------------------------------------- */

typedef struct {
    int hop, bins, count, max_samples, slot, phase, explained;
    double hop_s, rate_hz, doubt, far_active, start_variance, max_path_gain, variance_floor, counts, level_s;
    double headroom_s, latest_s, start_s, clip_share, clip_rate, judge_s, worse_db, quick_s, patience_s, min_gain_db;
    double sure_confidence, far_level, mic_level, path_gain, clipped, slow[2], quick[2], active, doubtful, trust;
    float mic_peak;
    Iir dc[2], high[3];
    Delay delay;
    FarLine past;
    Kalman kalman;
    Shadow shadow;
    Complex *spectra;
    double *mean;
    float *power, *pair, *raw, *mic_high, *far_high, *mic, *far, *echo, *error;
} Linear;

static Linear new_linear(const char *text, int rate_hz, int hop) {
    Linear s = {.hop = hop, .bins = hop + 1, .hop_s = (double)hop / rate_hz, .rate_hz = rate_hz, .trust = 1};
    s.count = (int)number(text, "num_partitions"), s.max_samples = (int)number(text, "max_samples");
    s.far_active = number(text, "far_active"), s.start_variance = number(text, "start_variance");
    s.max_path_gain = number(text, "max_path_gain"), s.variance_floor = number(text, "variance_floor");
    s.counts = pow(number(text, "int16"), 2), s.level_s = number(text, "level_s"), s.doubt = number(text, "doubt");
    s.headroom_s = number(text, "headroom_s"), s.latest_s = number(text, "latest_s");
    s.clip_share = number(text, "clip_share"), s.sure_confidence = number(text, "sure_confidence");
    s.start_s = number(text, "start_s"), s.clip_rate = number(text, "clip_rate"), s.judge_s = number(text, "judge_s");
    s.worse_db = number(text, "worse_db"), s.quick_s = number(text, "quick_s");
    s.patience_s = number(text, "patience_s"), s.min_gain_db = number(text, "min_gain_db");
    for (int i = 0; i < 2; i++) s.dc[i] = dc_blocker(number(text, "dc_cutoff_hz"), rate_hz);
    for (int i = 0; i < 3; i++) s.high[i] = high_pass(number(text, "high_pass_hz"), rate_hz);
    s.delay = new_delay(value_of(text, "delay"), rate_hz, hop);
    s.past = new_line(text, hop, s.count, s.max_samples);
    s.kalman = new_kalman(text, hop, &s.high[0]);
    double *profile = zeros((size_t)s.count, sizeof(double));
    if ((int)numbers(value_of(text, "start_profile"), profile, (size_t)s.count) != s.count)
        die("contract.json: start_profile is too short", "");
    for (int l = 0; l < s.count; l++) s.kalman.profile[l] = (float)profile[l];
    free(profile);
    s.kalman.posterior = !strncmp(value_of(text, "output"), "\"posterior\"", 11);
    s.shadow = new_shadow(value_of(text, "shadow"), &s.delay, s.hop_s);
    size_t bins = (size_t)s.bins, rows = 2 * (size_t)s.count;
    s.spectra = zeros(rows * bins, sizeof(Complex)), s.power = zeros(rows * bins, sizeof(float));
    s.mean = zeros(rows, sizeof(double));
    float **waves[] = {&s.pair, &s.raw, &s.mic_high, &s.far_high, &s.mic, &s.far, &s.echo, &s.error};
    for (size_t i = 0; i < sizeof waves / sizeof *waves; i++) *waves[i] = zeros(2 * (size_t)hop, sizeof(float));
    return s;
}

static int clipping(Linear *s, const float *mic) {
    float top = mic[0], bottom = mic[0];
    for (int n = 1; n < s->hop; n++) top = fmaxf(top, mic[n]), bottom = fminf(bottom, mic[n]);
    float peak = fmaxf(top, -bottom);
    s->mic_peak = fmaxf(peak, s->mic_peak);
    float level = (float)s->clip_share * s->mic_peak;
    int count = 0;
    if (peak >= level && top - bottom > 0.5f * s->mic_peak)
        for (int n = 0; n < s->hop; n++) count += fabsf(mic[n]) >= level;
    s->clipped += s->clip_rate * ((count >= 3) - s->clipped);
    return count >= 3 && s->clipped < 0.3;
}

/* -> the power gain that the echo path may have at most */
static double path_gain(const Linear *s) {
    return fmin(s->mic_level / (s->far_level + TINY), s->max_path_gain * (s->mic_peak > 4 ? s->counts : 1));
}

/* -> whether the far end is active; *floor: least variance */
static int levels(Linear *s, int start, double *floor_out) {
    double far = 0, mic = mean_square(s->mic, s->hop);
    for (int l = 0; l < s->count; l++) far += s->mean[start + l] / s->count / s->hop;
    int on = far > s->far_active * (far > 4 ? s->counts : 1) && far > 1e-5 * s->far_level;
    if (on) {
        double rate = s->far_level == 0 ? 1 : fmin(1, s->hop_s / s->level_s);
        s->far_level += rate * (far - s->far_level);
        s->mic_level += rate * (mic - s->mic_level);
    }
    double age = s->active + on, gain = s->path_gain;
    s->active = fmin(age, 1e6);
    double ratio = path_gain(s);
    if (on && ratio > 0 && age * s->hop_s <= s->start_s) gain = fmax(gain, exp2(floor(log2(ratio + TINY))));
    *floor_out = gain * (gain > s->path_gain ? s->start_variance : s->variance_floor);
    s->path_gain = gain;
    return on;
}

static void judge(Linear *s, int on) {
    const float *x[2] = {s->mic_high, s->kalman.errors[1] + s->hop};
    for (int i = 0; i < 2 && on; i++) {
        double now = mean_square(x[i], s->hop);
        s->slow[i] += fmin(1, s->hop_s / (s->judge_s / 2)) * (now - s->slow[i]);
        s->quick[i] += fmin(1, s->hop_s / s->quick_s) * (now - s->quick[i]);
    }
    int reduced = s->slow[0] > s->slow[1] * pow(10, s->min_gain_db / 10) && s->active * s->hop_s > s->start_s;
    int aligned = s->delay.confidence > s->sure_confidence && s->delay.agree >= s->delay.num_agree;
    double doubtful = reduced || aligned ? 0 : s->doubtful + on;
    s->doubtful = fmin(doubtful, 1e6);
    s->explained |= reduced || aligned;
    int lost = doubtful > (s->explained ? s->patience_s : s->judge_s) / s->hop_s;
    int worse = !s->explained && s->quick[0] < s->quick[1] * pow(10, -s->worse_db / 10);
    s->trust += fmin(1, s->hop_s / s->quick_s) * (!(lost || worse) - s->trust);
}

/* The spectrum of the pair of hops, into a row of the ring and its twin. */
static void write_row(Linear *s, int slot) {
    int bins = s->bins;
    Complex *fresh = s->spectra + (size_t)slot * (size_t)bins;
    float *power = s->power + (size_t)slot * (size_t)bins;
    size_t twin = (size_t)s->count * (size_t)bins;
    double mean = 0;
    rfft(&s->kalman.fft, s->pair, fresh);
    for (int k = 0; k < bins; k++) mean += power[k] = fresh[k].re * fresh[k].re + fresh[k].im * fresh[k].im;
    memcpy(fresh + twin, fresh, (size_t)bins * sizeof(Complex));
    memcpy(power + twin, power, (size_t)bins * sizeof(float));
    s->mean[slot] = s->mean[slot + s->count] = mean / bins;
}

/* Delays the far end by so many samples more, its past included. */
static void move(Linear *s, int samples) {
    FarLine *f = &s->past;
    int hop = s->hop;
    s->path_gain = fmax(s->path_gain, path_gain(s));
    shift(&s->kalman, samples, s->start_variance * s->path_gain);
    f->whole += samples;
    for (int i = 0; i < s->count; i++) {
        int back = (s->count - i) * hop;
        float begin = f->fraction - f->rate * (float)back, middle = rintf(begin + f->rate * (0.5f * (float)hop));
        int base = f->whole + (int)middle;
        memmove(s->pair, s->pair + hop, (size_t)hop * sizeof(float));
        read_line(f, back, base > 0 ? base : 0, begin - middle, s->pair + hop);
        if (i) write_row(s, (s->slot + i) % s->count);
    }
}

static void align(Linear *s) {
    Delay *d = &s->delay;
    if (!s->max_samples) return;
    observe(d, s->mic, s->raw, s->phase, s->hop);
    s->phase = (s->phase + 1) % d->period;
    if (s->phase) return;
    update(d);
    s->past.rate = (float)d->rate;
    if (d->jolt) doubt(&s->kalman, s->doubt, 0);
    double inside = d->lag * d->factor - s->past.whole - s->past.fraction, headroom = s->headroom_s * s->rate_hz;
    /* between samples the line needs a few beyond the one that it reads */
    int least = (s->past.rate != 0 ? s->past.taps / 2 : 0) - s->past.whole, samples = least > 0 ? least : 0;
    if (d->found && (inside < 0.5 * headroom || inside > s->latest_s * s->rate_hz)) {
        int wished = (int)fmax(fmin(rint(inside - headroom), s->max_samples - s->past.whole), least);
        samples = abs(wished) >= 0.5 * headroom ? wished : samples;
    }
    if (samples) move(s, samples);
}

static void linear_step(Linear *s, const float *mic, const float *far) {
    int hop = s->hop, clipped = clipping(s, mic);
    filter(&s->dc[0], mic, s->mic, hop);
    filter(&s->dc[1], far, s->raw, hop);
    advance(&s->past, s->raw, s->far);
    memmove(s->pair, s->pair + hop, (size_t)hop * sizeof(float));
    memcpy(s->pair + hop, s->far, (size_t)hop * sizeof(float));
    write_row(s, s->slot);
    s->slot = (s->slot + 1) % s->count;
    const Complex *seen = s->spectra + (size_t)s->slot * (size_t)s->bins;
    const float *power = s->power + (size_t)s->slot * (size_t)s->bins;

    double floor_value;
    int on = levels(s, s->slot, &floor_value), learn = on && !clipped;
    const float *echo = predict(&s->kalman, seen);
    float *error = s->kalman.errors[0] + hop, *left = s->kalman.errors[1] + hop;
    for (int n = 0; n < hop; n++) error[n] = s->mic[n] - echo[n];
    filter(&s->high[0], s->mic, s->mic_high, hop);
    filter(&s->high[1], error, left, hop);
    filter(&s->high[2], s->far, s->far_high, hop);
    const float *after = correct(&s->kalman, seen, power, learn, floor_value);
    for (int n = 0; n < hop; n++) s->echo[n] = s->mic[n] - after[n];
    const float *const waves[3] = {s->mic_high, s->far_high, left};
    double quick = fmax(floor_value, s->shadow.floor * s->start_variance * s->path_gain);
    int alarm = watch(&s->shadow, waves, on, learn, quick);
    if (alarm) doubt(&s->kalman, s->doubt, alarm == 2);
    judge(s, on);
    for (int n = 0; n < hop; n++) {
        s->echo[n] *= (float)s->trust;
        s->error[n] = s->mic[n] - s->echo[n];
    }
    align(s);
}

/* --- network: one step of the graph, states fed back ------------------------------------------------------------------ */

typedef struct {
    OrtSession *session;
    const char *in_names[MAX_STATES], *out_names[MAX_STATES];
    OrtValue *in[2][MAX_STATES], *out[2][MAX_STATES]; /* two sets of states take turns */
    float *input[2], *output;
    size_t num_inputs, count;
    int now;
} Network;

static OrtValue *tensor(const OrtMemoryInfo *memory, float *data, size_t size, const int64_t *shape, size_t axes) {
    OrtValue *value = NULL;
    ok(ort->CreateTensorWithDataAsOrtValue(memory, data, size * sizeof(float), shape, axes, ORT_FLOAT, &value));
    return value;
}

static Network new_network(const char *folder, const char *text) {
    Network g = {0};
    const char *library = getenv("ONNXRUNTIME_LIB");
    void *handle = dlopen(library ? library : "libonnxruntime.so.1", RTLD_NOW);
    if (!handle) die("onnxruntime isn't found: set ONNXRUNTIME_LIB to its .so", dlerror());
    const OrtApiBase *(*base)(void);
    *(void **)&base = dlsym(handle, "OrtGetApiBase");
    if (!base) die("this is no onnxruntime", library);
    ort = base()->GetApi(ORT_API_VERSION);
    OrtEnv *env;
    OrtSessionOptions *options;
    OrtMemoryInfo *memory;
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, quoted(value_of(text, "file"), NULL));
    ok(ort->CreateEnv(ORT_WARNING, "echofree", &env));
    ok(ort->CreateSessionOptions(&options));
    ok(ort->SetIntraOpNumThreads(options, 1));
    ok(ort->CreateSession(env, path, options, &g.session));
    ok(ort->CreateCpuMemoryInfo(1, 0, &memory)); /* arena allocator, default memory */

    int64_t shape[16];
    size_t axes;
    const char *at = value_of(text, "inputs"), *end = strchr(at, '}');
    while (at < end && strchr(at, '"') < end) {
        if (g.num_inputs == 2) die("more inputs than this program knows", "");
        g.in_names[g.num_inputs] = quoted(at, &at);
        size_t size = shape_of(at, shape, &axes);
        g.input[g.num_inputs] = zeros(size, sizeof(float));
        g.in[0][g.num_inputs] = g.in[1][g.num_inputs] = tensor(memory, g.input[g.num_inputs], size, shape, axes);
        g.num_inputs++;
        at = strchr(at, ']') + 1;
    }
    g.out_names[0] = quoted(value_of(end, "output"), NULL);
    size_t size = shape_of(value_of(end, "output_shape"), shape, &axes);
    g.output = zeros(size, sizeof(float));
    g.out[0][0] = g.out[1][0] = tensor(memory, g.output, size, shape, axes);
    at = value_of(end, "states");
    end = strstr(at, "\"initial\"");
    if (*quoted(value_of(end, "initial"), NULL)) die("states that don't start at zero aren't read here", "");
    while ((at = strstr(at, "\"input\":")) && at < end) {
        size_t i = g.num_inputs + g.count, o = 1 + g.count++;
        if (i == MAX_STATES) die("more states than this program knows", "");
        g.in_names[i] = quoted(value_of(at, "input"), &at);
        g.out_names[o] = quoted(value_of(at, "output"), &at);
        size = shape_of(at, shape, &axes);
        float *data[2] = {zeros(size, sizeof(float)), zeros(size, sizeof(float))};
        for (int set = 0; set < 2; set++) {
            g.in[set][i] = tensor(memory, data[set], size, shape, axes);
            g.out[set][o] = tensor(memory, data[1 - set], size, shape, axes);
        }
    }
    return g;
}

static void network_step(Network *g) {
    ok(ort->Run(g->session, NULL, g->in_names, (const OrtValue *const *)g->in[g->now], g->num_inputs + g->count,
                g->out_names, 1 + g->count, g->out[g->now]));
    g->now = 1 - g->now;
}

/* --- sound files ------------------------------------------------------------------------------------------------------ */

static float *read_wav(const char *path, int rate_hz, long *count) {
    FILE *file = fopen(path, "rb");
    uint8_t head[12], chunk[8], form[16];
    if (!file || fread(head, 1, 12, file) != 12 || memcmp(head, "RIFF", 4) || memcmp(head + 8, "WAVE", 4))
        die("no WAV file", path);
    int kind = 0, bits = 0;
    while (fread(chunk, 1, 8, file) == 8) {
        uint32_t size = chunk[4] | (uint32_t)chunk[5] << 8 | (uint32_t)chunk[6] << 16 | (uint32_t)chunk[7] << 24;
        if (!memcmp(chunk, "fmt ", 4)) {
            if (size < 16 || fread(form, 1, 16, file) != 16) die("no WAV file", path);
            kind = form[0] | form[1] << 8, bits = form[14] | form[15] << 8;
            int channels = form[2] | form[3] << 8, rate = form[4] | form[5] << 8 | form[6] << 16;
            if (channels != 1 || rate != rate_hz) die("one channel at the model's rate was expected", path);
            size -= 16;
        } else if (!memcmp(chunk, "data", 4)) {
            if (!((kind == 1 && bits == 16) || (kind == 3 && bits == 32))) die("16 bit or float was expected", path);
            *count = (long)(size / (uint32_t)(bits / 8));
            float *wave = zeros((size_t)*count, sizeof(float));
            for (long n = 0; n < *count; n++) {
                int16_t sample;
                size_t got = kind == 3 ? fread(wave + n, 4, 1, file) : fread(&sample, 2, 1, file);
                if (got != 1) die("truncated", path);
                if (kind == 1) wave[n] = (float)sample / 32768.0f;
            }
            fclose(file);
            return wave;
        }
        fseek(file, (long)(size + (size & 1)), SEEK_CUR);
    }
    die("no sound in", path);
    return NULL;
}

static void write_wav(const char *path, const float *wave, uint32_t count, uint32_t rate_hz) {
    FILE *file = fopen(path, "wb");
    if (!file) die("can't write", path);
    uint32_t bytes = 4 * count, fields[] = {36 + bytes, 16, 3 | 1u << 16, rate_hz, 4 * rate_hz, 4 | 32u << 16, bytes};
    fwrite("RIFF", 1, 4, file);
    fwrite(fields, 4, 1, file);
    fwrite("WAVEfmt ", 1, 8, file);
    fwrite(fields + 1, 4, 5, file);
    fwrite("data", 1, 4, file);
    fwrite(fields + 6, 4, 1, file);
    if (fwrite(wave, 4, count, file) != count || fclose(file)) die("can't write", path);
}

/* --- the chain -------------------------------------------------------------------------------------------------------- */

int main(int argc, char **argv) {
    if (argc != 5) die("usage: echofree EXPORT_FOLDER mic.wav far.wav out.wav", "");
    const char *text = read_file(argv[1], "contract.json");
    if (strncmp(value_of(text, "status"), "\"checked\"", 9)) die("this artifact doesn't agree with its model", argv[1]);
    int rate_hz = (int)number(text, "sample_rate"), hop = (int)number(text, "hop_samples"), num_signals = 0;
    char *kind = quoted(value_of(text, "kind"), NULL);
    int spectra = !strcmp(kind, "spectra"), wave = !strcmp(kind, "wave");
    Linear linear;
    if (!wave) linear = new_linear(strstr(text, "\"front_end\": {"), rate_hz, hop);
    Network network;
    if (spectra || wave) network = new_network(argv[1], text);
    const float *signals[MAX_SIGNALS];
    for (const char *at = value_of(text, "signals"), *end = strchr(at, ']'); spectra && strchr(at, '"') < end;) {
        char *name = quoted(at, &at);
        if (num_signals == MAX_SIGNALS) die("more signals than this program knows", "");
        signals[num_signals++] = !strcmp(name, "mic")     ? linear.mic
                                 : !strcmp(name, "echo")  ? linear.echo
                                 : !strcmp(name, "error") ? linear.error
                                                          : linear.far;
    }
    size_t size = (size_t)hop;
    float *window = zeros(2 * size, sizeof(float)), *frames = zeros(MAX_SIGNALS * 2 * size, sizeof(float));
    float *windowed = zeros(2 * size, sizeof(float)), *overlap = zeros(size, sizeof(float));
    for (int n = 0; n < 2 * hop; n++) window[n] = (float)sin(PI / 2 * pow(sin(PI * (n + 0.5) / (2 * hop)), 2));

    long count, far_count;
    float *mic = read_wav(argv[2], rate_hz, &count), *far = read_wav(argv[3], rate_hz, &far_count);
    float *out = zeros((size_t)count + size, sizeof(float)), *pair[2] = {zeros(size, sizeof(float)), zeros(size, sizeof(float))};
    clock_t begin = clock();
    for (long at = 0; at + hop <= count; at += hop) { /* what a hop gives is heard while the next one is recorded */
        for (long n = 0; n < hop; n++) pair[0][n] = mic[at + n], pair[1][n] = at + n < far_count ? far[at + n] : 0;
        float *made = out + at + hop;
        if (wave) {
            for (int i = 0; i < 2; i++) memcpy(network.input[i], pair[i], size * sizeof(float));
            network_step(&network);
            memcpy(made, network.output, size * sizeof(float));
            continue;
        }
        linear_step(&linear, pair[0], pair[1]);
        if (!spectra) {
            memcpy(made, linear.error, size * sizeof(float));
            continue;
        }
        for (int i = 0; i < num_signals; i++) {
            float *frame = frames + (size_t)i * 2 * size;
            memmove(frame, frame + hop, size * sizeof(float));
            memcpy(frame + hop, signals[i], size * sizeof(float));
            for (int n = 0; n < 2 * hop; n++) windowed[n] = frame[n] * window[n];
            rfft(&linear.kalman.fft, windowed, (Complex *)network.input[0] + (size_t)i * (size + 1));
        }
        network_step(&network);
        irfft(&linear.kalman.fft, (const Complex *)network.output, windowed);
        for (int n = 0; n < hop; n++) {
            made[n] = overlap[n] + windowed[n] * window[n];
            overlap[n] = windowed[hop + n] * window[hop + n];
        }
    }
    double spent = (double)(clock() - begin) / CLOCKS_PER_SEC, length = (double)count / rate_hz;
    write_wav(argv[4], out, (uint32_t)count, (uint32_t)rate_hz);
    printf("%.2f s of audio in %.3f s: real-time factor %.4f; late by %d samples\n", length, spent, spent / length,
           (int)number(text, "latency_samples"));
    return 0;
}

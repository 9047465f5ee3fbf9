/* An exported canceller in C: onnxruntime's C API for the network, and the linear stage beside it (DC blocker, delay,
 * Kalman filter), with the numbers of the artifact's contract.json.
 *
 *     make
 *     ONNXRUNTIME_LIB=/path/to/libonnxruntime.so ./echofree export/onnx mic.wav far.wav out.wav
 *
 * mic.wav and far.wav: one channel, 16 bit or float, at the model's rate. out.wav: float, as a stream gives it, so late
 * by latency_samples. The same steps as in src/echofree/runtime, where they are explained.
 *
 * Legend: M hop, F bins (M + 1), L partitions, R blocks of the far-end ring (each stands twice, R rows apart).
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

static void transform(const Fft *f, const Complex *in, int stride, Complex *out, int n) {
    if (n == 1) {
        out[0] = in[0];
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

/* --- delay: GCC-PHAT at a low rate ------------------------------------------------------------------------------------ */

typedef struct {
    double low_rate_hz, tolerance, min_confidence, forget, lag, confidence, candidate;
    int far_size, mic_size, lead, taps, num_agree, factor, low_hop, period, first, last, agree, found;
    float *kernel, *line[2], *fresh[2], *mic, *far, *segment, *values;
    Complex *cross, *spectrum[2];
    Fft fft;
} Delay;

static double bessel0(double x) {
    double sum = 1, term = 1;
    for (int k = 1; k < 60; k++) sum += term *= (x / 2 / k) * (x / 2 / k);
    return sum;
}

static Delay new_delay(const char *text, int rate_hz, int hop) {
    Delay d = {.low_rate_hz = number(text, "low_rate_hz"), .tolerance = number(text, "tolerance"),
               .min_confidence = number(text, "min_confidence"), .forget = number(text, "forget")};
    d.far_size = (int)number(text, "far_samples"), d.mic_size = (int)number(text, "mic_samples");
    d.lead = (int)number(text, "lead_samples"), d.taps = (int)number(text, "taps");
    d.num_agree = (int)number(text, "num_agree"), d.period = (int)number(text, "period");
    d.factor = rate_hz / (int)d.low_rate_hz, d.low_hop = hop / d.factor;
    d.kernel = zeros((size_t)d.taps, sizeof(float));
    double sum = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < d.taps; i++) {
            double n = i - (d.taps - 1) / 2.0, x = PI * n * 0.9 / d.factor, edge = 2 * n / (d.taps - 1);
            double h = (x == 0 ? 1 : sin(x) / x) * bessel0(5 * sqrt(1 - edge * edge)) / bessel0(5);
            if (pass) d.kernel[i] = (float)(h / sum);
            else sum += h;
        }
    for (int i = 0; i < 2; i++) {
        d.line[i] = zeros((size_t)(d.taps - 1 + hop), sizeof(float));
        d.fresh[i] = zeros((size_t)(d.period * d.low_hop), sizeof(float));
        d.spectrum[i] = zeros((size_t)(d.far_size / 2 + 1), sizeof(Complex));
    }
    d.mic = zeros((size_t)(d.mic_size + d.lead), sizeof(float)), d.far = zeros((size_t)d.far_size, sizeof(float));
    d.segment = zeros((size_t)d.far_size, sizeof(float)), d.values = zeros((size_t)d.far_size, sizeof(float));
    d.cross = zeros((size_t)(d.far_size / 2 + 1), sizeof(Complex));
    for (int k = 0; k <= d.far_size / 2; k++) {
        double hz = k * d.low_rate_hz / d.far_size;
        d.first += hz < number(text, "low_hz"), d.last += hz <= number(text, "high_hz");
    }
    d.fft = new_fft(d.far_size);
    return d;
}

static void observe(Delay *d, const float *mic, const float *far, int slot, int hop) {
    const float *x[2] = {mic, far};
    for (int i = 0; i < 2; i++) {
        float *line = d->line[i];
        memcpy(line + d->taps - 1, x[i], (size_t)hop * sizeof(float));
        for (int j = 0; j < d->low_hop; j++) {
            float sum = 0;
            for (int t = 0; t < d->taps; t++) sum += d->kernel[d->taps - 1 - t] * line[(j + 1) * d->factor - 1 + t];
            d->fresh[i][slot * d->low_hop + j] = sum;
        }
        memmove(line, line + hop, (size_t)(d->taps - 1) * sizeof(float));
    }
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

static void update(Delay *d) {
    int count = d->period * d->low_hop, num_lags = d->far_size - d->mic_size + 1, best = 0;
    push(d->mic, d->mic_size + d->lead, d->fresh[0], count);
    push(d->far, d->far_size, d->fresh[1], count);
    memcpy(d->segment, d->mic, (size_t)d->mic_size * sizeof(float));
    rfft(&d->fft, d->segment, d->spectrum[0]);
    rfft(&d->fft, d->far, d->spectrum[1]);
    double level = 0, square = 0;
    for (int k = d->first; k < d->last; k++) {
        Complex m = d->spectrum[0][k];
        m.im = -m.im;
        d->spectrum[1][k] = times(m, d->spectrum[1][k]);
        level += hypot(d->spectrum[1][k].re, d->spectrum[1][k].im) / (d->last - d->first);
    }
    if (!(level > 1e-12) || !steady(d)) return;
    for (int k = d->first; k < d->last; k++) {
        Complex c = d->spectrum[1][k];
        double scale = (1 - d->forget) / (hypot(c.re, c.im) + 0.05 * level + 1e-20);
        d->cross[k].re = (float)(d->forget * d->cross[k].re + scale * c.re);
        d->cross[k].im = (float)(d->forget * d->cross[k].im + scale * c.im);
    }
    irfft(&d->fft, d->cross, d->values);
    for (int i = 0; i < num_lags; i++) {
        d->values[i] = fabsf(d->values[i]);
        square += (double)d->values[i] * d->values[i] / num_lags;
        if (d->values[i] > d->values[best]) best = i;
    }
    double offset = 0;
    if (best >= 1 && best <= num_lags - 2) {
        double left = d->values[best - 1], right = d->values[best + 1], curve = left - 2 * d->values[best] + right;
        if (curve < 0) offset = fmin(fmax((left - right) / (2 * curve - 1e-20), -0.5), 0.5);
    }
    double lag = d->far_size - d->mic_size - d->lead - best - offset;
    d->confidence = d->values[best] / (sqrt(square) + 1e-20);
    if (d->confidence <= d->min_confidence) {
        d->agree = 0;
        return;
    }
    d->agree = fabs(lag - d->candidate) <= d->tolerance ? (d->agree < 100 ? d->agree + 1 : 100) : 1;
    d->candidate = lag;
    if (d->agree >= d->num_agree) d->lag = lag, d->found = 1;
}

/* --- the linear stage ------------------------------------------------------------------------------------------------- */

typedef struct {
    int hop, bins, count, ring, max_blocks, posterior, slot, phase, blocks, explained;
    double hop_s, transition, smoothing, far_active, start_variance, max_path_gain, variance_floor, counts, level_s;
    double headroom_s, latest_s, start_s, clip_rate, judge_s, worse_db, quick_s, patience_s, min_gain_db;
    double far_level, mic_level, path_gain, clipped, slow[2], quick[2], active, doubt, trust;
    float mic_peak;
    Iir dc[2], high[2];
    Delay delay;
    Fft fft;
    Complex *spectra, *weight, *response, *sum, *plain, *passed, *drive, *part;
    float *power, *variance, *psd, *total, *explained_power, *line, *wave, *errors[2], *mic_high;
    double *mean;
    float *mic, *far_now, *far, *echo, *error;
} Linear;

static Linear new_linear(const char *text, int rate_hz, int hop) {
    Linear s = {.hop = hop, .bins = hop + 1, .hop_s = (double)hop / rate_hz, .trust = 1};
    s.count = (int)number(text, "num_partitions"), s.max_blocks = (int)number(text, "max_blocks");
    s.ring = s.count + s.max_blocks + 1;
    s.posterior = !strncmp(value_of(text, "output"), "\"posterior\"", 11);
    s.transition = number(text, "transition"), s.smoothing = number(text, "psd_smoothing");
    s.far_active = number(text, "far_active"), s.start_variance = number(text, "start_variance");
    s.max_path_gain = number(text, "max_path_gain"), s.variance_floor = number(text, "variance_floor");
    s.counts = pow(number(text, "int16"), 2), s.level_s = number(text, "level_s");
    s.headroom_s = number(text, "headroom_s"), s.latest_s = number(text, "latest_s");
    s.start_s = number(text, "start_s"), s.clip_rate = number(text, "clip_rate"), s.judge_s = number(text, "judge_s");
    s.worse_db = number(text, "worse_db"), s.quick_s = number(text, "quick_s");
    s.patience_s = number(text, "patience_s"), s.min_gain_db = number(text, "min_gain_db");
    for (int i = 0; i < 2; i++) {
        s.dc[i] = dc_blocker(number(text, "dc_cutoff_hz"), rate_hz);
        s.high[i] = high_pass(number(text, "high_pass_hz"), rate_hz);
        s.errors[i] = zeros((size_t)(2 * hop), sizeof(float));
    }
    s.delay = new_delay(value_of(text, "delay"), rate_hz, hop);
    s.fft = new_fft(2 * hop);
    size_t bins = (size_t)s.bins, rows = 2 * (size_t)s.ring, num = (size_t)s.count, size = (size_t)hop;
    s.spectra = zeros(rows * bins, sizeof(Complex)), s.power = zeros(rows * bins, sizeof(float));
    s.mean = zeros(rows, sizeof(double));
    s.weight = zeros(num * bins, sizeof(Complex)), s.variance = zeros(num * bins, sizeof(float));
    Complex **rowsets[] = {&s.response, &s.sum, &s.plain, &s.passed, &s.drive, &s.part};
    for (size_t i = 0; i < sizeof rowsets / sizeof *rowsets; i++) *rowsets[i] = zeros(bins, sizeof(Complex));
    float **lines[] = {&s.psd, &s.total, &s.explained_power};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) *lines[i] = zeros(bins, sizeof(float));
    float **waves[] = {&s.line, &s.wave, &s.mic_high, &s.mic, &s.far_now, &s.far, &s.echo, &s.error};
    for (size_t i = 0; i < sizeof waves / sizeof *waves; i++) *waves[i] = zeros(2 * size, sizeof(float));
    for (int k = 0; k < s.bins; k++) { /* response of the high-pass at the bins */
        double w = PI * k / hop, c1 = cos(w), s1 = -sin(w), c2 = cos(2 * w), s2 = -sin(2 * w);
        const double *b = s.high[0].b, *a = s.high[0].a;
        double tr = b[0] + b[1] * c1 + b[2] * c2, ti = b[1] * s1 + b[2] * s2;
        double br = a[0] + a[1] * c1 + a[2] * c2, bi = a[1] * s1 + a[2] * s2, norm = br * br + bi * bi;
        s.response[k] = (Complex){(float)((tr * br + ti * bi) / norm), (float)((ti * br - tr * bi) / norm)};
    }
    return s;
}

static double mean_square(const float *x, int count) {
    double sum = 0;
    for (int n = 0; n < count; n++) sum += (double)x[n] * x[n];
    return sum / count;
}

static int clipping(Linear *s, const float *mic) {
    float top = mic[0], bottom = mic[0];
    for (int n = 1; n < s->hop; n++) top = fmaxf(top, mic[n]), bottom = fminf(bottom, mic[n]);
    float peak = fmaxf(top, -bottom);
    s->mic_peak = fmaxf(peak, s->mic_peak);
    float level = 0.9999f * s->mic_peak;
    int count = 0;
    if (peak >= level && top - bottom > 0.5f * s->mic_peak)
        for (int n = 0; n < s->hop; n++) count += fabsf(mic[n]) >= level;
    s->clipped += s->clip_rate * ((count >= 3) - s->clipped);
    return count >= 3 && s->clipped < 0.3;
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
    double ratio = fmin(s->mic_level / (s->far_level + TINY), s->max_path_gain * (s->mic_peak > 4 ? s->counts : 1));
    if (on && ratio > 0 && age * s->hop_s <= s->start_s) gain = fmax(gain, exp2(floor(log2(ratio + TINY))));
    *floor_out = gain * (gain > s->path_gain ? s->start_variance : s->variance_floor);
    s->path_gain = gain;
    return on;
}

static void judge(Linear *s, int on) {
    const float *x[2] = {s->mic_high, s->errors[1] + s->hop};
    for (int i = 0; i < 2 && on; i++) {
        double now = mean_square(x[i], s->hop);
        s->slow[i] += fmin(1, s->hop_s / (s->judge_s / 2)) * (now - s->slow[i]);
        s->quick[i] += fmin(1, s->hop_s / s->quick_s) * (now - s->quick[i]);
    }
    int reduced = s->slow[0] > s->slow[1] * pow(10, s->min_gain_db / 10) && s->active * s->hop_s > s->start_s;
    int aligned = s->delay.confidence > s->delay.min_confidence && s->delay.agree >= s->delay.num_agree;
    double doubt = reduced || aligned ? 0 : s->doubt + on;
    s->doubt = fmin(doubt, 1e6);
    s->explained |= reduced || aligned;
    int lost = doubt > (s->explained ? s->patience_s : s->judge_s) / s->hop_s;
    int worse = !s->explained && s->quick[0] < s->quick[1] * pow(10, -s->worse_db / 10);
    s->trust += fmin(1, s->hop_s / s->quick_s) * (!(lost || worse) - s->trust);
}

/* Learns from errors; -> the error by which the output is defined. */
static const float *correct(Linear *s, int start, int learn, double floor_value) {
    int bins = s->bins, hop = s->hop;
    const Complex *x = s->spectra + (size_t)start * (size_t)bins;
    const float *power = s->power + (size_t)start * (size_t)bins, *error = s->errors[0] + hop;
    float a = (float)s->transition, gain = a * a, leak = (float)(1 - s->transition * s->transition);
    rfft(&s->fft, s->errors[0], s->plain);
    rfft(&s->fft, s->errors[1], s->passed);
    for (int k = 0; k < bins; k++) {
        Complex e = s->passed[k], h = {s->response[k].re, -s->response[k].im};
        float sum = 0, h2 = h.re * h.re + h.im * h.im;
        s->psd[k] += (float)(1 - s->smoothing) * (e.re * e.re + e.im * e.im - s->psd[k]);
        for (int l = 0; l < s->count; l++) sum += s->variance[l * bins + k] * power[l * bins + k];
        float explained = h2 * sum, total = explained + 2.0f / (float)s->count * s->psd[k] + TINY;
        s->plain[k].re *= 1 - explained / total, s->plain[k].im *= 1 - explained / total;
        s->drive[k] = times(e, h);
        s->drive[k].re /= total, s->drive[k].im /= total;
        s->total[k] = -0.5f * gain * h2 / total;
    }
    if (s->posterior) {
        irfft(&s->fft, s->plain, s->wave);
        memcpy(s->far_now + hop, s->wave + hop, (size_t)hop * sizeof(float)); /* its second half is free */
        error = s->far_now + hop;
    }
    for (int l = 0; l < s->count; l++) {
        Complex *w = s->weight + (size_t)l * (size_t)bins;
        float *v = s->variance + (size_t)l * (size_t)bins;
        const float *p = power + (size_t)l * (size_t)bins;
        if (learn) {
            for (int k = 0; k < bins; k++) {
                Complex c = {x[l * bins + k].re, -x[l * bins + k].im};
                c = times(c, s->drive[k]);
                s->part[k] = (Complex){c.re * v[k], c.im * v[k]};
            }
            irfft(&s->fft, s->part, s->wave);
            memset(s->wave + hop, 0, (size_t)hop * sizeof(float));
            rfft(&s->fft, s->wave, s->part);
        }
        for (int k = 0; k < bins; k++) {
            if (learn) w[k].re += s->part[k].re, w[k].im += s->part[k].im;
            w[k].re *= a, w[k].im *= a;
            v[k] *= learn ? v[k] * p[k] * s->total[k] + gain : gain;
            v[k] = fmaxf(v[k] + leak * (w[k].re * w[k].re + w[k].im * w[k].im), (float)floor_value);
        }
    }
    return error;
}

static void shift(Linear *s, int blocks) {
    size_t bins = (size_t)s->bins, num = (size_t)s->count;
    Complex *weight = zeros(num * bins, sizeof(Complex));
    float *variance = zeros(num * bins, sizeof(float));
    for (int l = 0; l < s->count; l++) {
        int from = l - blocks, valid = from >= 0 && from < s->count;
        for (size_t k = 0; k < bins; k++)
            variance[(size_t)l * bins + k] =
                valid ? s->variance[(size_t)from * bins + k] : (float)(s->start_variance * s->path_gain);
        if (valid) memcpy(weight + (size_t)l * bins, s->weight + (size_t)from * bins, bins * sizeof(Complex));
    }
    memcpy(s->weight, weight, num * bins * sizeof(Complex));
    memcpy(s->variance, variance, num * bins * sizeof(float));
    free(weight);
    free(variance);
}

static void align(Linear *s) {
    Delay *d = &s->delay;
    if (!s->max_blocks) return;
    observe(d, s->mic, s->far_now, s->phase, s->hop);
    s->phase = (s->phase + 1) % d->period;
    if (s->phase) return;
    update(d);
    double lag_s = d->lag / d->low_rate_hz, inside_s = lag_s - s->blocks * s->hop_s;
    if (!d->found || (inside_s >= 0.5 * s->headroom_s && inside_s <= s->latest_s)) return;
    int wanted = (int)fmin(fmax(floor((lag_s - s->headroom_s) / s->hop_s), 0), s->max_blocks);
    if (wanted != s->blocks) shift(s, wanted - s->blocks);
    s->blocks = wanted;
}

static void linear_step(Linear *s, const float *mic, const float *far) {
    int hop = s->hop, bins = s->bins, clipped = clipping(s, mic);
    filter(&s->dc[0], mic, s->mic, hop);
    filter(&s->dc[1], far, s->far_now, hop);
    memmove(s->line, s->line + hop, (size_t)hop * sizeof(float));
    memcpy(s->line + hop, s->far_now, (size_t)hop * sizeof(float));
    Complex *fresh = s->spectra + (size_t)s->slot * (size_t)bins;
    float *power = s->power + (size_t)s->slot * (size_t)bins;
    size_t twin = (size_t)s->ring * (size_t)bins;
    double mean = 0;
    rfft(&s->fft, s->line, fresh);
    for (int k = 0; k < bins; k++) mean += power[k] = fresh[k].re * fresh[k].re + fresh[k].im * fresh[k].im;
    memcpy(fresh + twin, fresh, (size_t)bins * sizeof(Complex));
    memcpy(power + twin, power, (size_t)bins * sizeof(float));
    s->mean[s->slot] = s->mean[s->slot + s->ring] = mean / bins;
    int start = ((s->slot - s->blocks - s->count + 1) % s->ring + s->ring) % s->ring;
    const Complex *seen = s->spectra + (size_t)start * (size_t)bins;

    double floor_value;
    int on = levels(s, start, &floor_value);
    memset(s->sum, 0, (size_t)bins * sizeof(Complex));
    for (int l = 0; l < s->count; l++)
        for (int k = 0; k < bins; k++) {
            Complex y = times(s->weight[l * bins + k], seen[l * bins + k]);
            s->sum[k].re += y.re, s->sum[k].im += y.im;
        }
    irfft(&s->fft, s->sum, s->wave);
    for (int n = 0; n < hop; n++) s->errors[0][hop + n] = s->mic[n] - s->wave[hop + n];
    filter(&s->high[0], s->mic, s->mic_high, hop);
    filter(&s->high[1], s->errors[0] + hop, s->errors[1] + hop, hop);
    const float *after = correct(s, start, on && !clipped, floor_value);
    for (int n = 0; n < hop; n++) s->echo[n] = s->mic[n] - after[n];
    judge(s, on);
    for (int n = 0; n < hop; n++) {
        s->echo[n] *= (float)s->trust;
        s->error[n] = s->mic[n] - s->echo[n];
    }
    irfft(&s->fft, seen + (size_t)(s->count - 1) * (size_t)bins, s->wave);
    memcpy(s->far, s->wave + hop, (size_t)hop * sizeof(float));
    align(s);
    s->slot = (s->slot + 1) % s->ring;
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
            rfft(&linear.fft, windowed, (Complex *)network.input[0] + (size_t)i * (size + 1));
        }
        network_step(&network);
        irfft(&linear.fft, (const Complex *)network.output, windowed);
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

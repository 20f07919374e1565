import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * A session of the JDK's HttpClient as it comes: each request asks to upgrade its connection to HTTP/2 (h2c).
 * session.py says what a program prints. Texts are printed as they are escaped in the JSON of replies.
 */
public class UseHttpClient {
    // In UTF-8, which System.out writes in some locales alone.
    private static final PrintStream OUT =
            new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
    private static final HttpClient CLIENT = HttpClient.newHttpClient();
    private static final String USER = "{\"role\":\"user\",\"content\":\"hi\"}";
    private static final String SAMPLING = "\"max_tokens\":64,\"temperature\":0";
    private static final String TOOLS = """
            "tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object",\
            "properties":{"city":{"type":"string","enum":["Sofia"]}},"required":["city"],\
            "additionalProperties":false}}}]""";
    private static final String FORMAT = """
            "response_format":{"type":"json_schema","json_schema":{"name":"forecast","strict":true,"schema":\
            {"type":"object","properties":{"city":{"type":"string","enum":["Sofia","Varna"]},\
            "rain":{"type":"boolean"}},"required":["city","rain"],"additionalProperties":false}}}""";
    private static String baseUrl;

    public static void main(String[] args) throws IOException, InterruptedException {
        baseUrl = args[0];
        HttpRequest models = request("/models").build();
        String listed = CLIENT.send(models, BodyHandlers.ofString()).body();
        report("models", "[\"" + String.join("\",\"", values(listed, "id")) + "\"]");
        report("chat", quoted(value(ask(USER, SAMPLING), "content")));
        String events = ask(USER, "\"stream\":true," + SAMPLING);
        report("stream", quoted(String.join("", values(events, "content"))));
        report("tools", callTools());
        report("schema", value(ask(USER, FORMAT + "," + SAMPLING), "content").replace("\\\"", "\""));
        HttpResponse<String> refused = CLIENT.send(
                chat("{\"role\":\"user\",\"content\":\"" + "a ".repeat(4096) + "\"}", SAMPLING), BodyHandlers.ofString());
        report("too-long", "[\"" + refused.statusCode() + "\",\"" + value(refused.body(), "code") + "\"]");
        String fields = "\"stream\":true,\"max_tokens\":4000,\"logprobs\":true,\"top_logprobs\":20,\"ignore_eos\":true";
        HttpResponse<InputStream> stream = CLIENT.send(chat(USER, fields), BodyHandlers.ofInputStream());
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(stream.body()))) {
            report("cancel", String.valueOf(lines.readLine().startsWith("data: ")));
        }
    }

    private static String callTools() throws IOException, InterruptedException {
        StringBuilder messages = new StringBuilder(USER);
        List<String> calls = new ArrayList<>();
        for (int round = 0; round < 2; round++) {
            String fields = "\"tool_choice\":\"required\",\"parallel_tool_calls\":false," + TOOLS + "," + SAMPLING;
            String calling = ask(messages.toString(), fields);
            String call = calling.substring(calling.indexOf("\"tool_calls\""));
            String id = value(call, "id");
            String name = value(call, "name");
            String arguments = value(call, "arguments");
            calls.add("[\"" + name + "\",\"" + arguments + "\"]");
            messages.append(",{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"" + id
                    + "\",\"type\":\"function\",\"function\":{\"name\":\"" + name + "\",\"arguments\":\"" + arguments
                    + "\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"" + id + "\",\"content\":\"sunny\"}");
        }
        String end = ask(messages.toString(), "\"tool_choice\":\"auto\"," + TOOLS + "," + SAMPLING);
        return "{\"calls\":[" + String.join(",", calls) + "],\"text\":" + quoted(value(end, "content")) + "}";
    }

    private static String ask(String messages, String fields) throws IOException, InterruptedException {
        return CLIENT.send(chat(messages, fields), BodyHandlers.ofString()).body();
    }

    private static HttpRequest chat(String messages, String fields) {
        String body = "{\"model\":\"chatty\",\"messages\":[" + messages + "]," + fields + "}";
        return request("/chat/completions").header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body)).build();
    }

    private static HttpRequest.Builder request(String path) {
        return HttpRequest.newBuilder(URI.create(baseUrl + path)).header("Authorization", "Bearer KEY");
    }

    /** Return the strings that a key has in JSON, with their escapes. */
    private static List<String> values(String json, String key) {
        Matcher matcher = Pattern.compile("\"" + key + "\" ?: ?\"((?:[^\"\\\\]|\\\\.)*)\"").matcher(json);
        return matcher.results().map(result -> result.group(1)).toList();
    }

    private static String value(String json, String key) {
        return values(json, key).get(0);
    }

    private static String quoted(String escaped) {
        return "\"" + escaped + "\"";
    }

    private static void report(String step, String got) throws IOException {
        OUT.println("{\"step\":\"" + step + "\",\"got\":" + got + "}");
        System.in.read();
    }
}
